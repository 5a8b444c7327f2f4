/* corridor: agents come and go in a corridor of seven cells; each has to press a button at the end that it is told. Two discrete actions with masks;
 * everything in the main thread.
 *
 *     cc -std=c99 -O2 corridor.c -o corridor -lm
 *     ./corridor --episodes 1000       without a trainer: the heuristic acts, and its mean return is printed
 *
 * Options: --memory-path PATH (the trainer gives it), --seed N (1), --episodes N (1000; without a trainer).
 *
 * There are ten slots. An empty one waits, and then an agent with a new id arrives on cell 3; its goal is drawn: the left end (-1, cell 0) or the right
 * one (+1, cell 6). It sees its cell (seven numbers, one of them 1), its goal, and its steps / 30. Branch 0: 0 stay, 1 left (forbidden on cell 0),
 * 2 right (forbidden on cell 6). Branch 1: 0 nothing, 1 press (forbidden but on the ends). Who presses has its episode ended without moving: reward 1
 * at its goal, -1 at the other end. Each step costs 0.02; after 30 steps the episode is interrupted. The slot then waits for 1 to 4 ticks.
 */
#define TIDEMILL_IMPLEMENTATION
#include "tidemill.h"

enum { SLOTS = 10, CELLS = 7, STEPS = 30 };

typedef struct slot {
    uint32_t random;
    int wait; /* ticks until an agent arrives; 0: there is one */
    int32_t id, move, press;
    int cell, goal, steps;
    double episode_return;
} slot;

typedef struct game {
    tm_bridge *bridge;
    tm_world *world;
    slot slots[SLOTS];
    int32_t next_id;
    double seed, returns;
    long episodes;
} game;

static uint32_t next(uint32_t *state) {
    uint32_t x = *state += 0x9E3779B9u;
    x = (x ^ x >> 16) * 0x7FEB352Du;
    x = (x ^ x >> 15) * 0x846CA68Bu;
    return x ^ x >> 16;
}

static void seed(game *g, double value) {
    g->seed = value;
    for (uint32_t i = 0; i < SLOTS; i++) g->slots[i].random = (uint32_t)(int64_t)value * 0x85EBCA6Bu + i * 0xC2B2AE35u;
}

static void observe(tm_request request, const slot *s, double reward) {
    float seen[CELLS + 2] = {0};
    seen[s->cell] = 1;
    seen[CELLS] = (float)s->goal;
    seen[CELLS + 1] = (float)(s->steps / (double)STEPS);
    tm_set_reward(request, (float)reward);
    tm_set_observation(request, 0, seen, CELLS + 2);
}

static void decide(game *g, const slot *s, double reward) {
    int left = s->cell == 0, right = s->cell == CELLS - 1;
    tm_request request = tm_request_decision(g->world, s->id);
    observe(request, s, reward);
    tm_set_action_mask(request, 0, (const uint8_t[]){0, (uint8_t)left, (uint8_t)right}, 3);
    tm_set_action_mask(request, 1, (const uint8_t[]){0, (uint8_t)(!left && !right)}, 2);
}

static void tick(game *g, slot *s) {
    if (s->wait) {
        if (--s->wait) return;
        s->goal = next(&s->random) & 1 ? 1 : -1;
        s->cell = CELLS / 2;
        s->steps = 0;
        s->episode_return = 0;
        s->id = g->next_id++;
        decide(g, s, 0);
        return;
    }
    int left = s->cell == 0, right = s->cell == CELLS - 1, pressed = s->press == 1 && (left || right);
    double reward = -0.02;
    s->steps++;
    if (pressed) reward = ((s->goal < 0) == left ? 1 : -1) + reward;
    else if (s->move == 1 && !left) s->cell--;
    else if (s->move == 2 && !right) s->cell++;
    s->episode_return += reward;
    if (!pressed && s->steps < STEPS) {
        decide(g, s, reward);
        return;
    }
    observe(pressed ? tm_end_episode(g->world, s->id) : tm_interrupt_episode(g->world, s->id), s, reward);
    s->wait = 1 + (int)(next(&s->random) % 4);
    g->returns += s->episode_return;
    g->episodes++;
}

static void empty(game *g) {
    double value = tm_parameter(g->bridge, "seed", (float)g->seed);
    if (value != g->seed) seed(g, value);
    for (int i = 0; i < SLOTS; i++) g->slots[i].wait = i + 1;
}

static void reset(tm_bridge *bridge, void *user) {
    (void)bridge;
    empty(user);
}

/* Called for each action. */
static void act(tm_world *world, tm_action action, void *user) {
    game *g = user;
    (void)world;
    for (int i = 0; i < SLOTS; i++)
        if (!g->slots[i].wait && g->slots[i].id == action.agent_id) {
            g->slots[i].move = action.discrete[0];
            g->slots[i].press = action.discrete[1];
        }
}

static void heuristic(const tm_decision *decision, float *continuous, int32_t *discrete, void *user) {
    const float *seen = decision->observations[0];
    int goal = seen[CELLS] < 0 ? 0 : CELLS - 1;
    (void)continuous, (void)user;
    if (seen[goal] == 1) discrete[1] = 1;
    else discrete[0] = goal == 0 ? 1 : 2;
}

static double number(int argc, char **argv, const char *option, double otherwise) {
    for (int i = 1; i + 1 < argc; i++)
        if (strcmp(argv[i], option) == 0) return atof(argv[i + 1]);
    return otherwise;
}

int main(int argc, char **argv) {
    static game g;
    double wanted = number(argc, argv, "--episodes", 1000);
    int status = TM_OK;

    if (!(g.bridge = tm_bridge_open(argc, argv))) return fprintf(stderr, "corridor: %s\n", tm_error()), 1;
    g.world = tm_world_create(g.bridge, &(tm_world_spec){.name = "corridor",
                                                         .max_agents = SLOTS,
                                                         .observations = (tm_observation[]){{.shape = {CELLS + 2}}},
                                                         .observation_count = 1,
                                                         .branches = (int32_t[]){3, 2},
                                                         .branch_count = 2});
    if (!g.world) return fprintf(stderr, "corridor: %s\n", tm_error()), 1;
    tm_on_reset(g.bridge, reset, &g);
    tm_on_action(g.world, act, &g);
    tm_set_heuristic(g.world, heuristic, NULL);
    seed(&g, number(argc, argv, "--seed", 1));
    empty(&g);

    int trained = tm_bridge_has_trainer(g.bridge);
    while (trained || g.episodes < wanted) {
        for (int i = 0; i < SLOTS; i++) tick(&g, &g.slots[i]);
        status = tm_exchange(g.bridge);
        if (status == TM_CLOSED || status < 0) break;
    }
    if (status < 0) fprintf(stderr, "corridor: %s\n", tm_error());
    if (!trained && g.episodes) printf("mean return %.4f over %ld episodes\n", g.returns / (double)g.episodes, g.episodes);
    tm_bridge_close(g.bridge);
    return status < 0;
}
