/* The loss of DQN on plain layers that tell one number of each action, and its gradient:
   algorithms/dqn.py is the reference. See kernels.c for what may be rounded otherwise. */

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
static float base_of(const Transitions *b, const float *head)
{
    float sum = 0;
    for (int64_t k = 1; k <= b->actions && b->duelling; k++)
        sum += head[k];
    return b->duelling ? *head - sum / (float)b->actions : 0;
}

/* Return the first action that is the best of a row, or NaN. */
static int64_t best_of(const Transitions *b, int64_t row, const float *head)
{
    const uint8_t *forbidden = b->forbidden ? b->forbidden + row * b->actions : NULL;
    const float *told = head + b->duelling, base = base_of(b, head);
    float most = forbidden && *forbidden ? -INFINITY : *told + base;
    int64_t best = 0;
    for (int64_t k = 1; k < b->actions && most == most; k++) {
        float value = forbidden && forbidden[k] ? -INFINITY : told[k] + base;
        if (!(value <= most))
            most = value, best = k;
    }
    return best;
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
        int64_t best = best_of(b, r, b->twice ? online->out + r * size : head);
        b->value[r] = reward + discount * (head[b->duelling + best] + base_of(b, head));
    }
    forward_layers(online->layers, b->seen, n, online->hidden, online->out);
    memset(of_head, 0, n * size * sizeof *of_head);
    for (int64_t r = 0; r < n; r++, of_head += size) {
        const float *head = online->out + r * size;
        int64_t place = b->duelling + b->action[r];
        float value = head[place] + base_of(b, head), error = value - b->value[r], share = b->weight[r] / (float)n;
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
