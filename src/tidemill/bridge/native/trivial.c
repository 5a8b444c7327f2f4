/* trivial: worlds in which nothing happens, to measure the bridge itself.
 *
 *     cc -std=c99 -O2 trivial.c -o trivial -lm
 *
 * Options: --memory-path PATH (the trainer gives it), --agents N (10), --size K (floats of an observation, 4), --groups G (1: worlds "trivial",
 * "trivial1", …), --actions N (continuous, 2), --exchanges N (1000; without a trainer). Every agent asks for a decision in every exchange.
 */
#define TIDEMILL_IMPLEMENTATION
#include "tidemill.h"

static int32_t number(int argc, char **argv, const char *option, int32_t otherwise) {
    for (int i = 1; i + 1 < argc; i++)
        if (strcmp(argv[i], option) == 0) return (int32_t)atoi(argv[i + 1]);
    return otherwise;
}

int main(int argc, char **argv) {
    int32_t agents = number(argc, argv, "--agents", 10), size = number(argc, argv, "--size", 4), groups = number(argc, argv, "--groups", 1);
    long exchanges = number(argc, argv, "--exchanges", 1000);
    int status = TM_OK;
    tm_bridge *bridge = tm_bridge_open(argc, argv);
    tm_world **worlds = calloc((size_t)groups, sizeof *worlds);
    float *values = calloc((size_t)agents * (size_t)size, sizeof *values);
    if (!bridge || !worlds || !values) return fprintf(stderr, "trivial: %s\n", bridge ? "no memory" : tm_error()), 1;
    for (int32_t i = 0; i < agents * size; i++) values[i] = (float)i;
    for (int32_t group = 0; group < groups; group++) {
        char name[32] = "trivial";
        if (group) snprintf(name, sizeof name, "trivial%d", (int)group);
        worlds[group] = tm_world_create(bridge, &(tm_world_spec){.name = name,
                                                                 .max_agents = agents,
                                                                 .observations = (tm_observation[]){{.shape = {size}}},
                                                                 .observation_count = 1,
                                                                 .continuous = number(argc, argv, "--actions", 2)});
        if (!worlds[group]) return fprintf(stderr, "trivial: %s\n", tm_error()), 1;
    }
    while (tm_bridge_has_trainer(bridge) || exchanges-- > 0) {
        for (int32_t group = 0; group < groups; group++)
            for (int32_t id = 0; id < agents; id++) tm_set_observation(tm_request_decision(worlds[group], id), 0, values + (size_t)id * (size_t)size, (size_t)size);
        status = tm_exchange(bridge);
        if (status == TM_CLOSED || status < 0) break;
    }
    if (status < 0) fprintf(stderr, "trivial: %s\n", tm_error());
    tm_bridge_close(bridge);
    free(values);
    free(worlds);
    return status < 0;
}
