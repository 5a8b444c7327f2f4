/* reach: ten agents in the plane, each of which moves to a target of its own. Continuous actions; requests come from parallel threads.
 *
 *     cc -std=c99 -O2 reach.c -o reach -pthread -lm
 *     ./reach --episodes 1000          without a trainer: the heuristic acts, and its mean return is printed
 *
 * Options: --memory-path PATH (the trainer gives it), --seed N (1), --episodes N (1000; without a trainer), --threads N (2).
 *
 * An episode: place p and target t are drawn from [-1, 1]²; t again while it is within 0.1 of p. The agent sees t - p and p and moves by speed (environment
 * parameter, 0.1) times its action, clipped to [-1, 1]; p stays within [-1, 1]². Reward: by how much the distance shrank, and 1 when it is at most 0.1,
 * which ends the episode. After 50 steps it is interrupted. An agent whose episode ended begins another one at the next tick. All numbers are doubles.
 */
#define TIDEMILL_IMPLEMENTATION
#include "tidemill.h"

#include <pthread.h>

enum { AGENTS = 10, STEPS = 50, MOST_THREADS = AGENTS };
static const double RADIUS = 0.1;

typedef struct agent {
    uint32_t random;
    int active; /* it has an episode */
    double px, py, tx, ty;
    int steps;
    double episode_return;
    float action[2];
} agent;

typedef struct game {
    tm_bridge *bridge;
    tm_world *world;
    agent agents[AGENTS];
    double speed;
    double seed;
    int threads, over;
    pthread_barrier_t begin, end;
    long episodes[MOST_THREADS]; /* ended in each thread */
    double returns[AGENTS];      /* of each agent, summed up over its episodes */
} game;

static uint32_t next(uint32_t *state) {
    uint32_t x = *state += 0x9E3779B9u;
    x = (x ^ x >> 16) * 0x7FEB352Du;
    x = (x ^ x >> 15) * 0x846CA68Bu;
    return x ^ x >> 16;
}

static double uniform(agent *a) { return (next(&a->random) >> 8) / 16777216.0; }
static double clip(double x, double low, double high) { return x < low ? low : x > high ? high : x; }
static double distance(const agent *a) { return sqrt((a->tx - a->px) * (a->tx - a->px) + (a->ty - a->py) * (a->ty - a->py)); }

static void seed(game *g, double value) {
    g->seed = value;
    for (uint32_t i = 0; i < AGENTS; i++) g->agents[i].random = (uint32_t)(int64_t)value * 0x85EBCA6Bu + i * 0xC2B2AE35u;
}

static void set_row(tm_request request, const agent *a, double reward) {
    tm_set_reward(request, (float)reward);
    tm_set_observation_values(request, 0, (float)(a->tx - a->px), (float)(a->ty - a->py), (float)a->px, (float)a->py);
}

static void tick(game *g, int32_t id, long *episodes) {
    agent *a = &g->agents[id];
    if (!a->active) {
        a->px = 2 * uniform(a) - 1;
        a->py = 2 * uniform(a) - 1;
        do {
            a->tx = 2 * uniform(a) - 1;
            a->ty = 2 * uniform(a) - 1;
        } while (distance(a) <= RADIUS);
        a->active = 1;
        a->steps = 0;
        a->episode_return = 0;
        set_row(tm_request_decision(g->world, id), a, 0);
        return;
    }
    double before = distance(a), reward;
    a->px = clip(a->px + g->speed * clip(a->action[0], -1, 1), -1, 1);
    a->py = clip(a->py + g->speed * clip(a->action[1], -1, 1), -1, 1);
    double after = distance(a);
    int reached = after <= RADIUS;
    a->steps++;
    reward = before - after + (reached ? 1 : 0);
    a->episode_return += reward;
    if (!reached && a->steps < STEPS) {
        set_row(tm_request_decision(g->world, id), a, reward);
        return;
    }
    set_row(reached ? tm_end_episode(g->world, id) : tm_interrupt_episode(g->world, id), a, reward);
    tm_statistic(g->bridge, "reach/steps", (float)a->steps, TM_AVERAGE);
    a->active = 0;
    g->returns[id] += a->episode_return;
    ++*episodes;
}

/* Thread k ticks the agents k, k + threads, … */
static void tick_share(game *g, int k) {
    for (int32_t id = k; id < AGENTS; id += g->threads) tick(g, id, &g->episodes[k]);
}

typedef struct share {
    game *g;
    int k;
} share;

static void *helper(void *argument) {
    share *s = argument;
    for (;;) {
        pthread_barrier_wait(&s->g->begin);
        if (s->g->over) return NULL;
        tick_share(s->g, s->k);
        pthread_barrier_wait(&s->g->end);
    }
}

static void read_parameters(game *g) {
    double value = tm_parameter(g->bridge, "seed", (float)g->seed), speed = tm_parameter(g->bridge, "speed", NAN);
    if (value != g->seed) seed(g, value);
    g->speed = isnan(speed) ? 0.1 : clip(speed, 0.01, 1);
}

static void reset(tm_bridge *bridge, void *user) {
    game *g = user;
    (void)bridge;
    read_parameters(g);
    for (int i = 0; i < AGENTS; i++) g->agents[i].active = 0;
}

static void heuristic(const tm_decision *decision, float *continuous, int32_t *discrete, void *user) {
    const game *g = user;
    (void)discrete;
    for (int d = 0; d < 2; d++) continuous[d] = (float)clip(decision->observations[0][d] / g->speed, -1, 1);
}

static double number(int argc, char **argv, const char *option, double otherwise) {
    for (int i = 1; i + 1 < argc; i++)
        if (strcmp(argv[i], option) == 0) return atof(argv[i + 1]);
    return otherwise;
}

int main(int argc, char **argv) {
    static game g;
    pthread_t helpers[MOST_THREADS];
    share shares[MOST_THREADS];
    double wanted = number(argc, argv, "--episodes", 1000), sum = 0;
    long ended = 0;
    int status = TM_OK;

    if (!(g.bridge = tm_bridge_open(argc, argv))) return fprintf(stderr, "reach: %s\n", tm_error()), 1;
    g.world = tm_world_create(g.bridge, &(tm_world_spec){.name = "reach",
                                                         .max_agents = AGENTS,
                                                         .observations = (tm_observation[]){{.shape = {4}}},
                                                         .observation_count = 1,
                                                         .continuous = 2});
    if (!g.world) return fprintf(stderr, "reach: %s\n", tm_error()), 1;
    tm_on_reset(g.bridge, reset, &g);
    tm_set_heuristic(g.world, heuristic, &g);
    seed(&g, number(argc, argv, "--seed", 1));
    read_parameters(&g);

    g.threads = (int)clip(number(argc, argv, "--threads", 2), 1, MOST_THREADS);
    pthread_barrier_init(&g.begin, NULL, (unsigned)g.threads);
    pthread_barrier_init(&g.end, NULL, (unsigned)g.threads);
    for (int k = 1; k < g.threads; k++) {
        shares[k] = (share){&g, k};
        if (pthread_create(&helpers[k], NULL, helper, &shares[k])) return fprintf(stderr, "reach: cannot start thread %d; give --threads 1\n", k), 1;
    }
    int trained = tm_bridge_has_trainer(g.bridge);
    while (trained || ended < wanted) {
        if (g.threads > 1) pthread_barrier_wait(&g.begin);
        tick_share(&g, 0);
        if (g.threads > 1) pthread_barrier_wait(&g.end);
        status = tm_exchange(g.bridge);
        if (status == TM_CLOSED || status < 0) break;
        for (int32_t i = 0; i < tm_action_count(g.world); i++) {
            tm_action action = tm_action_at(g.world, i);
            memcpy(g.agents[action.agent_id].action, action.continuous, sizeof g.agents[0].action);
        }
        ended = 0;
        for (int k = 0; k < g.threads; k++) ended += g.episodes[k];
    }
    g.over = 1;
    if (g.threads > 1) pthread_barrier_wait(&g.begin);
    for (int k = 1; k < g.threads; k++) pthread_join(helpers[k], NULL);
    if (status < 0) fprintf(stderr, "reach: %s\n", tm_error());
    for (int i = 0; i < AGENTS; i++) sum += g.returns[i];
    if (!trained && ended) printf("mean return %.4f over %ld episodes\n", sum / (double)ended, ended);
    tm_bridge_close(g.bridge);
    return status < 0;
}
