/* A simulator for the tests: `probe CASE [NUMBER] --memory-path PATH`. What it says on standard output is looked at there. */
#define TIDEMILL_IMPLEMENTATION
#include "tidemill.h"

#include <pthread.h>

static tm_bridge *bridge;

static int say(const char *what, int status) {
    printf("%s: %d %s\n", what, status, status < 0 ? tm_error() : "");
    fflush(stdout);
    return status;
}

static tm_world *simple(const char *name, int32_t agents) {
    return tm_world_create(bridge, &(tm_world_spec){
        .name = name, .max_agents = agents, .observations = (tm_observation[]){{.shape = {4}}}, .observation_count = 1, .continuous = 2});
}

static void refused(const char *what, tm_world_spec spec) {
    tm_world *world = tm_world_create(bridge, &spec);
    printf("%s: %s\n", what, world ? "made" : tm_error());
}

static void errors(void) {
    tm_observation four = {.shape = {4}};
    int32_t three = 3, none = 0;
    tm_world *world = simple("small", 2);
    tm_request request;
    refused("long", (tm_world_spec){.name = "a234567890123456789012345678901234567890123456789012345678901234", .max_agents = 1, .continuous = 1});
    refused("63", (tm_world_spec){.name = "a23456789012345678901234567890123456789012345678901234567890123", .max_agents = 1, .continuous = 1});
    refused("twice", (tm_world_spec){.name = "small", .max_agents = 1, .continuous = 1});
    refused("agents", (tm_world_spec){.name = "b", .max_agents = 0, .continuous = 1});
    refused("actions", (tm_world_spec){.name = "c", .max_agents = 1, .observations = &four, .observation_count = 1});
    refused("branch", (tm_world_spec){.name = "d", .max_agents = 1, .branches = &none, .branch_count = 1});
    refused("huge", (tm_world_spec){.name = "e", .max_agents = INT32_MAX, .observations = &four, .observation_count = 1, .branches = &three, .branch_count = 1});
    four.shape[1] = -4;
    refused("shape", (tm_world_spec){.name = "f", .max_agents = 1, .observations = &four, .observation_count = 1, .continuous = 1});
    for (int32_t id = 0; id < 2; id++) say("in time", tm_request_decision(world, id).row);
    request = tm_request_decision(world, 2);
    say("too many", request.row);
    say("its reward", tm_set_reward(request, 1));
    say("exchange", tm_exchange(bridge));
    request = tm_request_decision(world, 0);
    say("size", tm_set_observation_values(request, 0, 1, 2, 3));
    say("exchange", tm_exchange(bridge));
    request = tm_request_decision(world, 0);
    say("index", tm_set_observation_values(request, 1, 1, 2, 3, 4));
    say("mask", tm_set_action_mask(request, 0, (const uint8_t[]){0, 1}, 2));
    say("exchange", tm_exchange(bridge));
    say("none", tm_exchange(bridge));
    tm_request_decision(world, 7);
    say("exchange", tm_exchange(bridge));
    say("actions", tm_action_count(world));
    say("action 1", tm_action_at(world, 1).agent_id);
}

/* A world more in each exchange, until there can be no more; then none more. */
static void grow(int count) {
    int status = TM_OK;
    for (int i = 0; status >= 0 && status != TM_CLOSED; i++) {
        char name[32];
        for (int w = 0; w <= i && w < count; w++) {
            tm_world *world;
            snprintf(name, sizeof name, "world%d", w);
            world = tm_world_find(bridge, name) ? tm_world_find(bridge, name) : simple(name, 1);
            tm_set_observation_values(tm_request_decision(world, 0), 0, (float)w, (float)i, 0, 0);
        }
        status = say("exchange", tm_exchange(bridge));
    }
}

static void echo(const uint8_t *bytes, size_t count, void *user) {
    tm_send(bridge, user, bytes, count);
    tm_send(bridge, user, bytes, count);
}

static void settings(tm_engine engine, void *user) {
    (void)user;
    printf("engine: %d %dx%d %d %g %d %d\n", engine.set, (int)engine.width, (int)engine.height, (int)engine.quality, engine.time_scale, (int)engine.target_frame_rate,
           (int)engine.capture_frame_rate);
}

/* Sends whatever comes on a channel back twice, and says what the standard channels brought. */
static void channels(void) {
    static const tm_channel own = {{1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16}, 1007};
    tm_world *world = simple("talker", 1);
    int status;
    tm_listen(bridge, &own, echo, (void *)&own);
    tm_on_engine(bridge, settings, NULL);
    tm_statistic(bridge, "began", 1.5f, TM_MOST_RECENT);
    tm_set_property(bridge, "height", 0.25f);
    do {
        tm_request_decision(world, 0);
        status = say("exchange", tm_exchange(bridge));
        printf("mass %g, height %g\n", tm_parameter(bridge, "mass", -1), tm_property(bridge, "height", -1));
        printf("drawn");
        for (int i = 0; i < 200; i++) printf(" %g", tm_parameter(bridge, "drawn", -1));
        printf("\n");
    } while (status >= 0 && status != TM_CLOSED);
}

/* Two groups with all kinds of rows: agent ids, rewards and observations can be told from one another. Both kinds of actions if `hybrid`. */
static void kinds(int hybrid) {
    tm_world *first, *second = NULL;
    int status = TM_OK;
    first = tm_world_create(bridge, &(tm_world_spec){.name = "first", .max_agents = 6, .observations = (tm_observation[]){{.shape = {2}}, {.shape = {3, 2, 1}}},
        .observation_count = 2, .continuous = hybrid ? 2 : 0, .branches = (int32_t[]){3, 2}, .branch_count = 2});
    if (!first) {
        say("create", -1);
        return;
    }
    for (int t = 0; status != TM_CLOSED && status >= 0; t++) {
        if (t == 2) second = simple("second", 3);
        for (int32_t id = 0; id < 4; id++) {
            float big[6];
            int ends = id == 1 || (id == 0 && t % 2); /* so that a row of a decision, with its mask, is one of an end in the next exchange */
            tm_request request = ends ? tm_end_episode(first, 10 * t + id) : id == 2 ? tm_interrupt_episode(first, 10 * t + id) : tm_request_decision(first, 10 * t + id);
            for (int j = 0; j < 6; j++) big[j] = (float)(1000 * t + 100 * id + j);
            if (t % 2 == 0) tm_set_reward(request, (float)(t + id / 10.0)); /* every other time: rows are complete all the same */
            if (t % 2 == 0) tm_set_observation_values(request, 0, (float)t, (float)id);
            tm_set_observation(request, 1, big, 6);
            if (id == 3 && t % 2 == 0) tm_set_action_mask(request, 0, (const uint8_t[]){1, 0, 7}, 3);
            if (id == 3 && t % 2 == 0) tm_set_action_mask(request, 1, (const uint8_t[]){0, 1}, 2);
        }
        if (second) tm_set_reward(tm_request_decision(second, 5), (float)t);
        status = tm_exchange(bridge);
        printf("t %d: %d %s\n", t, status, status < 0 ? tm_error() : "");
        for (int32_t i = 0; i < tm_action_count(first); i++) {
            tm_action action = tm_action_at(first, i);
            printf("first %d: %d %d", (int)action.agent_id, (int)action.discrete[0], (int)action.discrete[1]);
            if (hybrid) printf(" %g %g", action.continuous[0], action.continuous[1]);
            printf("\n");
        }
        for (int32_t i = 0; second && i < tm_action_count(second); i++)
            printf("second %d: %g %g\n", (int)tm_action_at(second, i).agent_id, tm_action_at(second, i).continuous[0], tm_action_at(second, i).continuous[1]);
        if (status == TM_RESET) t = -1;
        fflush(stdout);
    }
}

enum { MANY = 240, THREADS = 4 };
static tm_world *crowd;

static void *ask(void *argument) {
    for (int32_t id = (int32_t)(intptr_t)argument; id < MANY; id += THREADS) {
        tm_request request = tm_request_decision(crowd, id);
        tm_set_reward(request, (float)id);
        tm_set_observation_values(request, 0, (float)id, (float)-id, (float)(2 * id), 1);
        tm_statistic(bridge, "asked", (float)id, TM_SUM);
    }
    return NULL;
}

static void threads(void) {
    int status;
    crowd = simple("crowd", MANY);
    do {
        pthread_t helpers[THREADS];
        for (intptr_t k = 0; k < THREADS; k++) pthread_create(&helpers[k], NULL, ask, (void *)k);
        for (int k = 0; k < THREADS; k++) pthread_join(helpers[k], NULL);
        status = say("exchange", tm_exchange(bridge));
    } while (status >= 0 && status != TM_CLOSED);
}

/* Ends its own part after some exchanges, or goes on without the trainer. */
static void ends(int count, int hasty) {
    tm_world *world = simple("ending", 1);
    int status = TM_OK;
    for (int i = 0; i < count; i++) {
        if (hasty || status != TM_ERROR_DEADLINE) tm_request_decision(world, 0); /* after a deadline the old requests still wait */
        status = say("exchange", tm_exchange(bridge));
        if (status == TM_CLOSED) printf("trainer: %d\n", tm_bridge_has_trainer(bridge));
    }
}

/* Says what exchanges return that differs from "nothing to do", and asks for nothing; `count` requests before that. */
static void idle(int count) {
    tm_world *world = simple("idle", 1);
    struct timespec pause = {0, 1000000};
    int status = TM_OK;
    while (status >= 0 && status != TM_CLOSED) {
        if (count > 0) tm_request_decision(world, 0);
        count--;
        status = tm_exchange(bridge);
        if (status != TM_IDLE) say("exchange", status);
        nanosleep(&pause, NULL);
    }
}

/* Agents are made by a reset only. */
static void born(void) {
    tm_world *world = simple("born", 1);
    int resets = 0, status = TM_OK;
    while (status >= 0 && status != TM_CLOSED) {
        if (resets) tm_request_decision(world, resets);
        status = tm_exchange(bridge);
        resets += status == TM_RESET;
    }
}

/* Five agents ask; from then on all of them end their episode and ask in the same exchange. */
static void again(void) {
    tm_world *world = simple("again", 5);
    int status = TM_OK;
    for (int t = 0; status >= 0 && status != TM_CLOSED; t++) {
        for (int32_t id = 0; t && id < 5; id++) tm_set_reward(tm_end_episode(world, id), (float)id);
        for (int32_t id = 0; id < 5; id++) tm_set_reward(tm_request_decision(world, id), 10 + (float)id);
        status = tm_exchange(bridge);
    }
    if (status < 0) fprintf(stderr, "%s\n", tm_error());
}

/* Three worlds that are new in one turn, with side-channel data for which there is no room; closes after some exchanges. */
static void three(int count) {
    tm_world *worlds[3] = {simple("a", 1), simple("b", 1), simple("c", 1)};
    int status = TM_OK;
    for (int i = 0; i < count && status != TM_CLOSED; i++) {
        tm_statistic(bridge, "a name of some length, so that there is no room", (float)i, TM_SUM);
        for (int w = 0; w < 3; w++) tm_set_reward(tm_request_decision(worlds[w], 0), (float)i);
        status = say("exchange", tm_exchange(bridge));
    }
}

int main(int argc, char **argv) {
    const char *what = argc > 1 ? argv[1] : "";
    int count = argc > 2 ? atoi(argv[2]) : 0;
    tm_options options = tm_options_from(argc, argv);
    if (strcmp(what, "older-channels") == 0) options.framing = TM_FRAMING_TYPE;
    if (strcmp(what, "deadline") == 0 || strcmp(what, "hasty") == 0) options.deadline_seconds = 0.2;
    if (!(bridge = tm_bridge_open_with(&options))) return fprintf(stderr, "%s\n", tm_error()), 3;
    if (strcmp(what, "errors") == 0) errors();
    if (strcmp(what, "grow") == 0) grow(count);
    if (strcmp(what, "channels") == 0 || strcmp(what, "older-channels") == 0) channels();
    if (strcmp(what, "kinds") == 0) kinds(0);
    if (strcmp(what, "hybrid") == 0) kinds(1);
    if (strcmp(what, "threads") == 0) threads();
    if (strcmp(what, "ends") == 0 || strcmp(what, "deadline") == 0) ends(count, 0);
    if (strcmp(what, "hasty") == 0) ends(count, 1);
    if (strcmp(what, "idle") == 0) idle(count);
    if (strcmp(what, "born") == 0) born();
    if (strcmp(what, "three") == 0) three(count);
    if (strcmp(what, "again") == 0) again();
    tm_bridge_close(bridge);
    return 0;
}
