/* A step of Adam down a gradient whose norm is limited: algorithms/adam.py is the reference. Long
   gradients are cut into chunks, which threads take as they come. */

#include <math.h>

#include "threads.h"

#define squared JOIN(tidemill_square, ISA)
#define step JOIN(tidemill_adam, ISA)

#define CHUNK 16384
#define CHUNKS 1024   /* at most */
#define WORTH (1 << 16) /* weights from which a second thread is worth a hand-over */

double squared(int64_t n, const float *g);
void step(int64_t n, float *restrict weights, const float *restrict gradient, float *restrict first,
          float *restrict second, const float *factors);

typedef struct {
    int64_t n, each; /* weights, and those of a chunk */
    float *weights, *gradient, *first, *second;
    double squares[CHUNKS];
    float factors[6]; /* of `adam` */
} Descent;

static int64_t size_of(const Descent *d, int64_t chunk)
{
    int64_t left = d->n - chunk * d->each;
    return left < d->each ? left : d->each;
}

static void square_task(const void *job, int64_t chunk)
{
    Descent *d = (Descent *)job;
    d->squares[chunk] = squared(size_of(d, chunk), d->gradient + chunk * d->each);
}

static void adam_task(const void *job, int64_t chunk)
{
    const Descent *d = job;
    int64_t at = chunk * d->each;
    step(size_of(d, chunk), d->weights + at, d->gradient + at, d->first + at, d->second + at, d->factors);
}

/* Do step number `steps` down the gradient divided by share and then scaled down to the norm `limit`
   (< 0: not), unless its norm or the loss are not finite; return the norm before. */
double EXPORT(descend)(int64_t n, float *weights, float *gradient, float *first, float *second, int64_t steps,
                       double rate, double epsilon, double share, double limit, double loss)
{
    const double beta1 = 0.9, beta2 = 0.999;
    int64_t each = (n + CHUNKS - 1) / CHUNKS;
    Descent d = {.n = n, .each = each > CHUNK ? each : CHUNK,
                 .weights = weights, .gradient = gradient, .first = first, .second = second};
    int64_t chunks = (n + d.each - 1) / d.each;
    spread(square_task, &d, chunks, n >= WORTH);
    double sum = 0;
    for (int64_t i = 0; i < chunks; i++)
        sum += d.squares[i];
    double norm = sqrt((float)sum) / share;
    if (!isfinite(norm) || !isfinite(loss))
        return norm;
    double scale = (limit >= 0 && norm > limit ? limit / norm : 1) / share;
    double root = sqrt(1 - pow(beta2, (double)steps));
    d.factors[0] = (float)(scale * sqrt(1 - beta2)), d.factors[1] = (float)((1 - beta1) / sqrt(1 - beta2));
    d.factors[2] = (float)(epsilon * root), d.factors[3] = (float)(rate * root / (1 - pow(beta1, (double)steps)));
    d.factors[4] = (float)beta1, d.factors[5] = (float)beta2;
    spread(adam_task, &d, chunks, n >= WORTH);
    return norm;
}
