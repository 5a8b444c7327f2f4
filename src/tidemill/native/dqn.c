/* Plain layers that tell one number of each action: acting by them (nets/q_network.py is the
   reference), and DQN's loss and its gradient (algorithms/dqn.py is). See kernels.c for what may be
   rounded otherwise. */

#include <math.h>
#include <stddef.h>
#include <string.h>

#include "layers.h"

/* A network, and where what it tells goes: see `forward`. */
typedef struct {
    const Layers *layers;
    float *hidden, *out;
} Evaluated;

/* n transitions of up to `reach` steps, and what is told of them. A head is a number for each
   action, or, of a duelling network, the state's value and then the actions' advantages. */
typedef struct {
    Evaluated online, target; /* target.out is overwritten */
    int64_t n, reach, actions, duelling, twice; /* twice: the online network chooses */
    const float *seen, *then; /* [n, inputs], before and after */
    const uint8_t *forbidden; /* actions after, [n, actions]; NULL: none is */
    const int64_t *action;
    const float *rewards; /* [n, reach] */
    const int32_t *steps;
    const uint8_t *done;
    const float *weight, *powers; /* powers: of gamma, [reach + 1] */
    float *spare, *gradient; /* spare: see `backward` */
    float *losses, *error, *value; /* [n] */
} Transitions;

/* What is to be added to what a head tells of an action: Wang et al. 2016, eq. 9. */
static float base_of(int64_t actions, int64_t duelling, const float *head)
{
    float sum = 0;
    for (int64_t k = 1; k <= actions && duelling; k++)
        sum += head[k];
    return duelling ? *head - sum / (float)actions : 0;
}

/* Return the first action that is the best, or NaN; `value` becomes what is told of it. */
static int64_t best_of(int64_t actions, int64_t duelling, const uint8_t *forbidden, const float *head, float *value)
{
    const float *told = head + duelling, base = base_of(actions, duelling, head);
    int64_t best = 0;
    *value = forbidden && *forbidden ? -INFINITY : *told + base;
    for (int64_t k = 1; k < actions && *value == *value; k++) {
        float other = forbidden && forbidden[k] ? -INFINITY : told[k] + base;
        if (!(other <= *value))
            *value = other, best = k;
    }
    return best;
}

/* Rows to act on: the best action, or, where chance [n] is below epsilon, the one that was `drawn`
   among those that are allowed; what is told of the best one, and the probability of the action. */
typedef struct {
    Evaluated network;
    int64_t n, actions, duelling;
    const float *seen;
    const uint8_t *forbidden; /* [n, actions]; NULL: none is */
    const int64_t *drawn;
    const double *chance;
    double epsilon;
    int64_t *action;
    float *value;
    double *probability;
} Chosen;

void EXPORT(explore)(const Chosen *c)
{
    const float *head = c->network.out;
    forward_layers(c->network.layers, c->seen, c->n, c->network.hidden, c->network.out);
    for (int64_t r = 0; r < c->n; r++, head += c->actions + c->duelling) {
        const uint8_t *forbidden = c->forbidden ? c->forbidden + r * c->actions : NULL;
        int64_t best = best_of(c->actions, c->duelling, forbidden, head, c->value + r), allowed = c->actions;
        for (int64_t k = 0; k < c->actions && forbidden; k++)
            allowed -= forbidden[k];
        c->action[r] = c->chance[r] < c->epsilon ? c->drawn[r] : best;
        c->probability[r] = c->epsilon / (double)(allowed > 1 ? allowed : 1);
        c->probability[r] += c->action[r] == best ? 1 - c->epsilon : 0;
    }
}

/* Write the gradient of the loss, what each row adds to it before it is weighed, its error and what
   is told of its action; return the loss, or -1 where an action or a number of steps is none. */
double EXPORT(dqn)(const Transitions *b)
{
    const int64_t n = b->n, size = b->actions + b->duelling;
    const Evaluated *online = &b->online, *target = &b->target;
    float *of_head = target->out;
    double loss = 0;
    for (int64_t r = 0; r < n; r++)
        if (b->action[r] < 0 || b->action[r] >= b->actions || b->steps[r] < 0 || b->steps[r] > b->reach)
            return -1;
    forward_layers(target->layers, b->then, n, target->hidden, target->out);
    if (b->twice)
        forward_layers(online->layers, b->then, n, online->hidden, online->out);
    for (int64_t r = 0; r < n; r++) { /* value becomes what should be told of the action */
        float reward = 0, discount = b->done[r] ? 0 : b->powers[b->steps[r]];
        for (int64_t i = 0; i < b->reach; i++)
            reward += b->rewards[r * b->reach + i] * b->powers[i];
        const float *head = target->out + r * size;
        const uint8_t *forbidden = b->forbidden ? b->forbidden + r * b->actions : NULL;
        float most;
        int64_t best = best_of(b->actions, b->duelling, forbidden, b->twice ? online->out + r * size : head, &most);
        b->value[r] = reward + discount * (head[b->duelling + best] + base_of(b->actions, b->duelling, head));
    }
    forward_layers(online->layers, b->seen, n, online->hidden, online->out);
    memset(of_head, 0, n * size * sizeof *of_head);
    for (int64_t r = 0; r < n; r++, of_head += size) {
        const float *head = online->out + r * size;
        int64_t place = b->duelling + b->action[r];
        float value = head[place] + base_of(b->actions, b->duelling, head), error = value - b->value[r];
        float share = b->weight[r] / (float)n;
        float slope = error < -1 ? -1 : error > 1 ? 1 : error; /* NaN stays */
        b->value[r] = value;
        b->error[r] = fabsf(error);
        b->losses[r] = slope * (error - 0.5f * slope);
        loss += share * b->losses[r];
        slope *= share;
        if (b->duelling) {
            for (int64_t k = 1; k < size; k++)
                of_head[k] = -slope / (float)b->actions;
            *of_head = slope;
        }
        of_head[place] += slope;
    }
    backward_layers(online->layers, b->seen, n, online->hidden, target->out, b->spare, b->gradient, NULL);
    return loss;
}
