/* What an actor does in each tick with arrays of a number for each seat or lane:
   workers/step_books.py and envs/lane_ends.py are the reference. */

#include <string.h>

#include "vectors.h"

/* An array that is copied into a row of another one, whose rows lie `step` bytes apart. */
typedef struct {
    int64_t bytes, step;
    const char *from;
    char *into;
} Copy;

void EXPORT(copy_rows)(const Copy *copies, int64_t count, int64_t row)
{
    for (const Copy *c = copies; c < copies + count; c++)
        memcpy(c->into + row * c->step, c->from, c->bytes);
}

/* A tick of so many seats, and what is counted of their episodes. */
typedef struct {
    int64_t seats, wide; /* wide: returns are float64, else float32 */
    const float *reward;
    const uint8_t *done, *truncated, *present, *restarted;
    void *returns;
    int32_t *length;
} Counted;

/* Count a tick of seats that are in step; rewards go into `row`, unless that is NULL. Return
   whether an episode ends, or -1, with nothing done, where a seat is absent or has begun anew. */
int64_t EXPORT(count_tick)(const Counted *c, float *row)
{
    int apart = 0, ends = 0;
    for (int64_t i = 0; i < c->seats; i++) {
        apart |= !c->present[i] | c->restarted[i];
        ends |= c->done[i] | c->truncated[i];
    }
    if (apart)
        return -1;
    if (row)
        memcpy(row, c->reward, c->seats * sizeof *row);
    for (int64_t i = 0; i < c->seats; i++)
        c->length[i]++;
    for (int64_t i = 0; i < c->seats && c->wide; i++)
        ((double *)c->returns)[i] += c->reward[i];
    for (int64_t i = 0; i < c->seats && !c->wide; i++)
        ((float *)c->returns)[i] += c->reward[i];
    return ends;
}

/* Lanes that have stepped: env steps of each in its episode, how many an episode may have, and
   who waits to be reset; and the tick that tells of the step. */
typedef struct {
    int64_t lanes;
    const int64_t *count, *limit;
    uint8_t *idle, *done, *truncated, *present, *restarted;
    float *reward;
} Stepped;

/* Complete the tick, in which rewards and ends are written already, also of lanes that waited. */
void EXPORT(end_lanes)(const Stepped *s)
{
    memset(s->restarted, 0, s->lanes);
    for (int64_t i = 0; i < s->lanes; i++) {
        uint8_t acted = !s->idle[i];
        s->present[i] = acted;
        s->done[i] &= acted;
        s->truncated[i] = acted & !s->done[i] & (s->count[i] >= s->limit[i]);
        s->reward[i] = acted ? s->reward[i] : 0;
        s->idle[i] = !acted | s->done[i] | s->truncated[i];
    }
}
