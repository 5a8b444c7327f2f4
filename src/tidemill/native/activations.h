/* The activations of hidden layers, and their slopes; nets/activations.py is the reference. */

#pragma once
#include <math.h>
#include <stdint.h>
#include <string.h>

enum { TANH, RELU, ELU, GELU, SILU }; /* from GELU on slopes are kept: results do not tell them */
#define CUBIC 0.044715f
#define ROOT 0.79788456080286536f /* of 2 / pi */

/* e^x of x from -80 to 80: Moshier's polynomial (Cephes, expf). Written, as tanh_of is, so that a
   loop over it becomes vectors; NaN stays. */
static inline float exp_within(float x)
{
    /* x = n log 2 + r; adding 1.5 · 2²³ rounds to n, which is in the lowest bits then */
    float shifted = x * 1.44269504088896341f + 12582912.0f, n = shifted - 12582912.0f;
    float r = x - n * 0.693359375f + n * 2.12194440e-4f;
    float e = 1.9875691500e-4f;
    e = e * r + 1.3981999507e-3f;
    e = e * r + 8.3334519073e-3f;
    e = e * r + 4.1665795894e-2f;
    e = e * r + 1.6666665459e-1f;
    e = e * r + 5.0000001201e-1f;
    e = e * r * r + r + 1;
    uint32_t bits;
    float power;
    memcpy(&bits, &shifted, 4);
    bits = (bits - 0x4b400000u + 127u) << 23;
    memcpy(&power, &bits, 4);
    return e * power;
}

/* tanh, to 5 units in the last place, or 7 where no product is fused: x P(x²) / Q(x²), fitted to the
   least relative error (1.3e-9) up to 9.011, from where on a float's is 1. Sizes are compared as
   integers, which order floats without a sign alike: compilers make one instruction of that, and
   many where a comparison of floats must keep NaN. */
static inline float tanh_of(float x)
{
    const int32_t most = 0x41102d0e, one = 0x3f800000; /* 9.011 and 1, as floats */
    int32_t size, sign;
    float a, t;
    memcpy(&size, &x, 4);
    sign = size & INT32_MIN;
    size &= INT32_MAX;
    size = size < most ? size : most;
    memcpy(&a, &size, 4);
    float s = a * a, p = -1.2222721168e-11f, q = 1.2881183152e-6f;
    p = p * s + 3.0610923741e-8f;
    p = p * s + 2.8018207213e-5f;
    p = p * s + 3.8688597121e-3f;
    p = p * s + 1.3680339394e-1f;
    p = p * s + 1;
    q = q * s + 3.9395695653e-4f;
    q = q * s + 2.7247785031e-2f;
    q = q * s + 4.7013671468e-1f;
    q = q * s + 1;
    t = a * p / q;
    memcpy(&size, &t, 4);
    size = (size < one ? size : one) | sign;
    memcpy(&t, &size, 4);
    return x != x ? x : t;
}

/* h becomes what the activation makes of it; of GELU and SILU the slopes are written, too. */
static void activate(int64_t n, int64_t activation, float *restrict h, float *restrict slopes)
{
    if (activation == RELU)
        for (int64_t i = 0; i < n; i++)
            h[i] = h[i] < 0 ? 0 : h[i]; /* NaN stays */
    else if (activation == TANH)
        for (int64_t i = 0; i < n; i++)
            h[i] = tanh_of(h[i]);
    else if (activation == ELU)
        for (int64_t i = 0; i < n; i++) {
            float t = tanh_of(0.5f * h[i]); /* e^x - 1 = 2t / (1 - t) */
            h[i] = h[i] < 0 ? 2 * t / (1 - t) : h[i];
        }
    else if (activation == SILU)
        for (int64_t i = 0; i < n; i++) {
            float gate = 0.5f + 0.5f * tanh_of(0.5f * h[i]);
            h[i] *= gate;
            slopes[i] = gate + h[i] * (1 - gate);
        }
    else
        for (int64_t i = 0; i < n; i++) {
            float x = h[i], square = x * x, gate = 0.5f + 0.5f * tanh_of(ROOT * x * (1 + CUBIC * square));
            h[i] = x * gate;
            slopes[i] = gate + h[i] * (1 - gate) * (2 * ROOT * (1 + 3 * CUBIC * square));
        }
}

/* of_h ← of_h · the slope of the activation, whose results are h. */
static void deactivate(int64_t n, int64_t activation, const float *restrict h, const float *restrict slopes,
                       float *restrict of_h)
{
    if (activation == RELU)
        for (int64_t i = 0; i < n; i++)
            of_h[i] *= h[i] > 0 ? 1.0f : 0.0f;
    else if (activation == TANH)
        for (int64_t i = 0; i < n; i++)
            of_h[i] *= 1 - h[i] * h[i];
    else if (activation == ELU)
        for (int64_t i = 0; i < n; i++)
            of_h[i] *= h[i] < 0 ? 1 + h[i] : 1.0f;
    else
        for (int64_t i = 0; i < n; i++)
            of_h[i] *= slopes[i];
}
