/* Advantages and their targets; algorithms/policy_gradient_formulas.py is the reference. Rounding:
   see kernels.c. */

#include "vectors.h"

/* Rows [steps, seats] of a sample, see algorithms/policy_gradient_formulas.py. */
typedef struct {
    int64_t steps, seats;
    const float *reward, *value;
    const uint8_t *done, *truncated, *acted;
    const float *rho; /* of GAE NULL: no ratios */
    float *advantage, *target;
} Trajectory;

static inline float kept(const Trajectory *rows, int64_t i)
{
    float value = rows->value[i];
    return rows->acted[i] & !rows->done[i] ? value : 0;
}

static inline int trained(const Trajectory *rows, int64_t i)
{
    return rows->acted[i] & !rows->done[i] & !rows->truncated[i];
}

/* r + γ V' - V, of a row before the last. */
static inline float residual(const Trajectory *rows, int64_t i, float gamma)
{
    float delta = kept(rows, i + rows->seats) * gamma + rows->reward[i] - kept(rows, i);
    return trained(rows, i) ? delta : 0;
}

static inline float cut_ratio(const Trajectory *rows, int64_t i, float most)
{
    float rho = rows->rho[i], least = rho > most ? most : rho; /* NaN stays */
    return trained(rows, i) && i < (rows->steps - 1) * rows->seats ? least : 0;
}

/* `gae`; decay: γ λ. */
void EXPORT(gae)(const Trajectory *rows, float gamma, float decay)
{
    int64_t seats = rows->seats, last = (rows->steps - 1) * seats;
    float *advantage = rows->advantage;
    for (int64_t i = last; i < last + seats; i++)
        advantage[i] = 0, rows->target[i] = kept(rows, i);
    for (int64_t t = last - seats; t >= 0; t -= seats)
        for (int64_t i = t; i < t + seats; i++) {
            float next = rows->rho ? cut_ratio(rows, i + seats, 1) : 1;
            float carried = (trained(rows, i) ? decay : 0) * next * advantage[i + seats];
            advantage[i] = residual(rows, i, gamma) + carried;
            rows->target[i] = kept(rows, i) + (rows->rho ? cut_ratio(rows, i, 1) : 1) * advantage[i];
        }
}

/* `vtrace`; decay: γ λ. The target holds v - V until the row before has read it. */
void EXPORT(vtrace)(const Trajectory *rows, float gamma, float decay, float rho_clip, float c_clip)
{
    int64_t seats = rows->seats, last = (rows->steps - 1) * seats;
    for (int64_t i = last; i < last + seats; i++)
        rows->advantage[i] = rows->target[i] = 0;
    for (int64_t t = last - seats; t >= 0; t -= seats)
        for (int64_t i = t; i < t + seats; i++) {
            float rho = cut_ratio(rows, i, rho_clip), delta = residual(rows, i, gamma);
            float gap = rows->target[i + seats];
            rows->target[i] = rho * delta + cut_ratio(rows, i, c_clip) * decay * gap;
            rows->advantage[i] = rho * (delta + gamma * gap);
            rows->target[i + seats] = kept(rows, i + seats) + gap;
        }
    for (int64_t i = 0; i < seats; i++)
        rows->target[i] += kept(rows, i);
}

