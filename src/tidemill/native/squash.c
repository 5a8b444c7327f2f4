/* Actions of a Gaussian pressed into their bounds: nets/squashed_gaussian.py is the reference. */

#include "activations.h"
#include "vectors.h"

#define LOG_TWO 0.693147180559945309f
#define HALF_LOG_TWO_PI 0.918938533204672742f
#define LEAST (-20.0f)
#define MOST 2.0f

/* e^x of x up to 80; of what is less than -80 that of -80, 2e-35. NaN stays. */
static inline float exp_of(float x) { return exp_within(x < -80 ? -80 : x); }

/* log(1 + x) of x from 0 to 1: 2 artanh(x / (2 + x)), whose series ends below a unit in the last
   place. */
static inline float log_one_plus(float x)
{
    float z = x / (2 + x), s = z * z, sum = 1.0f / 13;
    sum = sum * s + 1.0f / 11;
    sum = sum * s + 1.0f / 9;
    sum = sum * s + 1.0f / 7;
    sum = sum * s + 1.0f / 5;
    sum = sum * s + 1.0f / 3;
    return 2 * (z + z * s * sum);
}

/* Of head [n, 2 · actions], means and then logarithms of deviations, and normal noise [n, actions]:
   write a = tanh(u) of u = mean + deviation · noise, deviation · noise, 1 where the logarithm of
   the deviation lies within its bounds, else 0, what each action adds to log π(a), and that [n]. */
void EXPORT(squash)(int64_t n, int64_t actions, const float *restrict head, const float *restrict noise,
                    float *restrict action, float *restrict spread, float *restrict uncut, float *restrict adds,
                    float *restrict log_prob)
{
    for (int64_t r = 0, i = 0; r < n; r++, head += 2 * actions)
        for (int64_t k = 0; k < actions; k++, i++) {
            float raw = head[actions + k];
            action[i] = head[k];
            spread[i] = raw < LEAST ? LEAST : raw > MOST ? MOST : raw; /* NaN stays */
            uncut[i] = spread[i] == raw ? 1.0f : 0.0f;
        }
    for (int64_t i = 0; i < n * actions; i++) {
        float log_std = spread[i], add = exp_of(log_std) * noise[i], u = action[i] + add, x = -2 * u;
        float soft = (x < 0 ? 0 : x) + log_one_plus(exp_of(-fabsf(x))); /* log(1 + e^x) */
        adds[i] = -0.5f * noise[i] * noise[i] - log_std - HALF_LOG_TWO_PI - 2 * (LOG_TWO - u - soft);
        spread[i] = add;
        action[i] = tanh_of(u);
    }
    for (int64_t r = 0; r < n; r++, adds += actions) {
        log_prob[r] = 0;
        for (int64_t k = 0; k < actions; k++)
            log_prob[r] += adds[k];
    }
}
