/* Transitions drawn from a replay memory: replay/sequences.py and replay/replay.py are the reference,
   equal in every bit. */

#include <stddef.h>
#include <string.h>

#include "vectors.h"

/* The rows of a memory's lanes, `length` places each, of which a lane has filled the first ones, or
   all; span is 0 where no transition begins. */
typedef struct {
    int64_t lanes, length;
    const int64_t *heads; /* rows ever written, per lane */
    const int32_t *span;
    int64_t *ends; /* rows of a lane and those before it: written by `held_rows` */
} Memory;

/* Return how many rows there are. */
int64_t EXPORT(held_rows)(const Memory *m)
{
    int64_t rows = 0;
    for (int64_t lane = 0; lane < m->lanes; lane++) {
        rows += m->heads[lane] < m->length ? m->heads[lane] : m->length;
        m->ends[lane] = rows;
    }
    return rows;
}

/* Of numbers drawn among the rows, write the places that begin a transition; return how many do. */
int64_t EXPORT(find_places)(const Memory *m, int64_t count, const int64_t *drawn, int64_t *places)
{
    int64_t found = 0;
    for (int64_t i = 0; i < count; i++) {
        int64_t lane = 0, beyond = m->lanes;
        while (beyond - lane > 1) { /* the first lane that ends after the row */
            int64_t middle = lane + (beyond - lane) / 2;
            if (m->ends[middle - 1] <= drawn[i])
                lane = middle;
            else
                beyond = middle;
        }
        int64_t place = lane * m->length + drawn[i] - (lane ? m->ends[lane - 1] : 0);
        places[found] = place;
        found += m->span[place] > 0;
    }
    return found;
}

/* What a transition has of a field of its rows: `bytes` of the row where it begins, of the one
   behind that, or of its last one. */
enum { FIRST_ROW, NEXT_ROW, LAST_ROW };

typedef struct {
    int64_t row, bytes;
    const char *from;
    char *into;
} Copied;

/* Transitions of up to `reach` steps. */
typedef struct {
    const Memory *memory;
    int64_t reach, fields;
    const Copied *copied;
    const float *reward; /* of each row, which led to it */
    const int64_t *version;
    int64_t *rows[3]; /* places, by FIRST_ROW …: the first ones are given */
    int32_t *steps;
    float *rewards;         /* [n, reach] */
    int64_t oldest, stamps; /* the least of the versions that acted, and their sum */
} Drawn;

static void copy(const Copied *field, int64_t n, const int64_t *places)
{
    const int64_t bytes = field->bytes;
    char *into = field->into;
    for (int64_t i = 0; i < n; i++, into += bytes) {
        const char *from = field->from + places[i] * bytes;
        if (bytes == 8) /* numbers that the compiler knows */
            memcpy(into, from, 8);
        else if (bytes == 1)
            *into = *from;
        else if (bytes == 16)
            memcpy(into, from, 16);
        else
            memcpy(into, from, bytes);
    }
}

/* Write what n transitions are. */
void EXPORT(gather)(Drawn *t, int64_t n)
{
    const Memory *m = t->memory;
    for (int64_t i = 0; i < n; i++) {
        int64_t first = t->rows[FIRST_ROW][i], within = first % m->length, start = first - within;
        int64_t steps = m->span[first];
        t->steps[i] = (int32_t)steps;
        t->rows[NEXT_ROW][i] = start + (within + 1) % m->length;
        t->rows[LAST_ROW][i] = start + (within + steps) % m->length;
        for (int64_t k = 0; k < t->reach; k++)
            t->rewards[i * t->reach + k] = k < steps ? t->reward[start + (within + k + 1) % m->length] : 0;
        int64_t version = t->version[t->rows[NEXT_ROW][i]];
        t->oldest = i && t->oldest < version ? t->oldest : version;
        t->stamps = (i ? t->stamps : 0) + version;
    }
    for (int64_t f = 0; f < t->fields; f++)
        copy(t->copied + f, n, t->rows[t->copied[f].row]);
}
