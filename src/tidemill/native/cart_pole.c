/* CartPole's dynamics; envs/classic_control.py is the reference. */

#include <math.h>

#include "vectors.h"

typedef struct {
    double force, gravity, total_mass, pole_mass, length, pole_mass_length, seconds, farthest, steepest;
    int64_t n;
    const int64_t *action;
    const double *cosine, *sine;
    double *state;
    uint8_t *over;
    float *seen;
} CartPoles;

/* A step of n carts as envs/classic_control.py does it, equal in every bit: no product is fused
   with a sum (build.py). state: [4, n]; over: who fell or left the track; seen: the state as it is observed,
   [n, 4]. */
void EXPORT(cart_pole)(const CartPoles *c)
{
    int64_t n = c->n;
    const double *cosine = c->cosine, *sine = c->sine;
    double *place = c->state, *speed = place + n, *angle = speed + n, *spin = angle + n;
    for (int64_t i = 0; i < n; i++) {
        double force = c->action[i] == 1 ? c->force : -c->force;
        double over_mass = (force + c->pole_mass_length * (spin[i] * spin[i]) * sine[i]) / c->total_mass;
        double bottom = c->length * (4.0 / 3.0 - c->pole_mass * (cosine[i] * cosine[i]) / c->total_mass);
        double turn = (c->gravity * sine[i] - cosine[i] * over_mass) / bottom;
        double acceleration = over_mass - c->pole_mass_length * turn * cosine[i] / c->total_mass;
        place[i] += c->seconds * speed[i];
        speed[i] += c->seconds * acceleration;
        angle[i] += c->seconds * spin[i];
        spin[i] += c->seconds * turn;
        c->over[i] = fabs(place[i]) > c->farthest || fabs(angle[i]) > c->steepest;
        float *seen = c->seen + 4 * i;
        seen[0] = place[i], seen[1] = speed[i], seen[2] = angle[i], seen[3] = spin[i];
    }
}
