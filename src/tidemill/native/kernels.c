/* The actor-critic of plain layers, and what PPO does with it: acting, the gradient of a
   minibatch, Adam. numpy's code (nets/numpy_actor_critic.py, algorithms/) is the reference.

   C11 with GCC's and Clang's vector types, no dependency but libm. The file is compiled once
   for each instruction set (see build.py); ISA names it and ends every exported name.

   Rounding: no -ffast-math. NaN and infinities pass through as numpy's would, and no processor
   flag is changed. What may differ from numpy is written out: products of matrices are summed
   over blocks of BLOCK rows, in order, and those sums are added; a product and the sum that it
   goes into may be rounded once (-ffp-contract=fast); tanh is a quotient of polynomials. */

#include <math.h>
#include <string.h>

#include "activations.h"
#include "threads.h"

#ifndef DIGEST
#define DIGEST 0 /* of these sources, by build.py */
#endif
#define BLOCK 64  /* rows worked on at a time: their activations stay in the caches */
#define FORBIDDEN -1e30f
#define HALF_LOG_TWO_PI 0.91893853320467274178

typedef float quad __attribute__((vector_size(16), aligned(4), may_alias));
typedef float one;

enum { CATEGORICAL, BERNOULLI, GAUSSIAN };
enum { POLICY, VALUE, ENTROPY, KL, CLIPPED, ROWS, PARTS, SQUARES };

/* A leaf of the action: of a Dict or Tuple one of several. An action is 4 bytes for each of its
   branches: int32, of GAUSSIAN float, in units. */
typedef struct {
    int64_t kind, size, branches; /* size: numbers of the head; as many branches, unless CATEGORICAL */
    const int64_t *sizes;         /* numbers of each branch; kind CATEGORICAL */
} Leaf;

/* A network: hidden layers in one or two towers, an actor's head and a critic's. The weights
   lie one after the other as nets/weights.py says. */
typedef struct {
    int64_t towers, layers, inputs, seen;     /* seen: columns of the inputs that the actor gets */
    int64_t activation, leaves;
    int64_t size, branches, deviations;       /* of all leaves; size: numbers of the actor's head */
    int64_t critic_layers;                    /* < 0: the critic has as many, stacked with the actor's */
    const int64_t *widths, *critic_widths;    /* of the hidden layers */
    const Leaf *actions;                      /* the leaves */
    float *weights, *scratch;                 /* scratch: as many as `scratch` says */
} Network;

/* The rows of an update, of which minibatches are picked. */
typedef struct {
    const float *features;    /* [rows, inputs] */
    const uint8_t *forbidden; /* [rows, size], or NULL */
    const int32_t *action;    /* [rows, branches], as a Leaf says */
    const float *log_prob, *advantage, *target, *value; /* [rows] each */
} Rows;

typedef struct {
    double clip, clip_value; /* clip_value < 0: values are not clipped */
    double value_coefficient, entropy_coefficient;
} Loss;

/* Where the parts of the weights, or of their gradient, begin. */
typedef struct {
    float *actor, *actor_bias, *critic, *critic_bias, *log_std;
} Places;

/* A tower's own hidden layers: where they are not stacked, the critic's lie behind the actor's. */
static int separate(const Network *net) { return net->critic_layers >= 0; }

static int64_t depth(const Network *net, int64_t tower)
{
    return separate(net) && tower ? net->critic_layers : net->layers;
}

static int64_t width_of(const Network *net, int64_t tower, int64_t layer)
{
    return (separate(net) && tower ? net->critic_widths : net->widths)[layer];
}

static int64_t below(const Network *net, int64_t tower, int64_t layer)
{
    return layer ? width_of(net, tower, layer - 1) : separate(net) && !tower ? net->seen : net->inputs;
}

static int64_t layer_size(const Network *net, int64_t tower, int64_t layer)
{
    return (separate(net) ? 1 : net->towers) * (below(net, tower, layer) + 1) * width_of(net, tower, layer);
}

/* Where a tower's layer begins; a layer behind the last one begins where they end. */
static int64_t layer_place(const Network *net, int64_t tower, int64_t layer)
{
    int64_t place = separate(net) && tower ? layer_place(net, 0, net->layers) : 0;
    for (int64_t i = 0; i < layer; i++)
        place += layer_size(net, tower, i);
    return place;
}

/* Where a tower's weights and biases of a layer begin in all weights. */
static int64_t weight_place(const Network *net, int64_t tower, int64_t layer)
{
    int64_t one = below(net, tower, layer) * width_of(net, tower, layer);
    return layer_place(net, tower, layer) + (separate(net) ? 0 : tower * one);
}

static int64_t bias_place(const Network *net, int64_t tower, int64_t layer)
{
    int64_t width = width_of(net, tower, layer), one = below(net, tower, layer) * width;
    return layer_place(net, tower, layer) + (separate(net) ? one : net->towers * one + tower * width);
}

static int64_t last_width(const Network *net, int64_t tower) { return below(net, tower, depth(net, tower)); }

static Places places(const Network *net, float *flat)
{
    int64_t critic = net->towers - 1;
    Places at;
    at.actor = flat + layer_place(net, critic, depth(net, critic));
    at.actor_bias = at.actor + net->size * last_width(net, 0);
    at.critic = at.actor_bias + net->size;
    at.critic_bias = at.critic + last_width(net, critic);
    at.log_std = at.critic_bias + 1;
    return at;
}

/* ---- products of matrices ---- */

/* A loop that is written out: an array whose every index is known then is in registers. */
#define EVERY(i, COUNT) _Pragma("GCC unroll 4") for (int i = 0; i < COUNT; i++)

/* c = Σ_p a(i, p) b[p, j] + start, for ROWS rows i and PARTS vectors of columns j, all of whose
   sums stay in registers; a(i, p) lies at a[i · row + p · step]. */
#define TILE(NAME, VECTOR, COUNT, WIDTH)                                                            \
    static inline void NAME(int64_t k, const float *a, int64_t row, int64_t step, const float *b,   \
                            int64_t ldb, const float *start, int64_t lds, float *c, int64_t ldc)    \
    {                                                                                               \
        enum { EACH = sizeof(VECTOR) / sizeof(float) };                                             \
        VECTOR sum[COUNT][WIDTH];                                                                   \
        EVERY(i, COUNT) EVERY(j, WIDTH) sum[i][j] = (VECTOR){0};                                    \
        for (int64_t p = 0; p < k; p++)                                                             \
            EVERY(i, COUNT) {                                                                       \
                float x = a[i * row + p * step];                                                    \
                EVERY(j, WIDTH) sum[i][j] += x * *(const VECTOR *)(b + p * ldb + j * EACH);         \
            }                                                                                       \
        if (start)                                                                                  \
            EVERY(i, COUNT) EVERY(j, WIDTH)                                                         \
                sum[i][j] += *(const VECTOR *)(start + i * lds + j * EACH);                         \
        EVERY(i, COUNT) EVERY(j, WIDTH) *(VECTOR *)(c + i * ldc + j * EACH) = sum[i][j];            \
    }

TILE(tile_4_2, wide, 4, 2)
TILE(tile_1_2, wide, 1, 2)
TILE(tile_4_1, wide, 4, 1)
TILE(tile_1_1, wide, 1, 1)
TILE(tile_4_quad, quad, 4, 1)
TILE(tile_1_quad, quad, 1, 1)
TILE(tile_4_one, one, 4, 1)
TILE(tile_1_one, one, 1, 1)

#define COLUMNS(EACH, FOUR, SINGLE)                                                                 \
    for (; j + (EACH) <= n; j += (EACH)) {                                                          \
        const float *begin = start ? start + j : NULL;                                              \
        int64_t i = 0;                                                                              \
        for (; i + 4 <= m; i += 4)                                                                  \
            FOUR(k, a + i * row, row, step, b + j, ldb, begin ? begin + i * lds : NULL, lds,        \
                 c + i * ldc + j, ldc);                                                             \
        for (; i < m; i++)                                                                          \
            SINGLE(k, a + i * row, row, step, b + j, ldb, begin ? begin + i * lds : NULL, lds,      \
                   c + i * ldc + j, ldc);                                                           \
    }

/* c [m, n] = a [m, k] · b [k, n] + start (NULL: zeros; lds 0: the same for each row). */
static void product(int64_t m, int64_t n, int64_t k, const float *a, int64_t row, int64_t step,
                    const float *b, int64_t ldb, const float *start, int64_t lds, float *c, int64_t ldc)
{
    int64_t j = 0;
    COLUMNS(2 * LANES, tile_4_2, tile_1_2)
    COLUMNS(LANES, tile_4_1, tile_1_1)
    COLUMNS(4, tile_4_quad, tile_1_quad)
    COLUMNS(1, tile_4_one, tile_1_one)
}

static float dot(int64_t n, const float *a, const float *b)
{
    wide sums;
    memset(&sums, 0, sizeof sums);
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES)
        sums += *(const wide *)(a + i) * *(const wide *)(b + i);
    float sum = 0;
    for (int l = 0; l < LANES; l++)
        sum += sums[l];
    for (; i < n; i++)
        sum += a[i] * b[i];
    return sum;
}

/* ---- layers ---- */

/* Where the intermediate results of a tower lie. Towers share none, so that each can be another
   thread's. */
typedef struct {
    double *totals;            /* [2 · size + 1]: gradients of heads' biases and log_std, over all blocks */
    float *inputs;             /* [BLOCK, inputs], gathered */
    float *hidden, *slopes;    /* for each layer [BLOCK, width]; slopes: see activations.h */
    float *head, *of_head, *p; /* [BLOCK, size] each */
    float *value, *of_value;   /* [BLOCK] each */
    float *gradient[2];        /* [BLOCK, widest] each */
    float *transposed;         /* the weights of layers above the first, [width, below] */
    float *deviation;          /* [deviations]: e^log_std; where a gradient is computed, one over it */
} Work;

/* Lay out the work of each tower; return how many floats that takes. */
static int64_t plan(const Network *net, float *at, Work *works)
{
    float *begin = at;
    for (int64_t t = 0; t < net->towers; t++) {
        int64_t widest = net->inputs > net->size ? net->inputs : net->size, all = 0, turned = 0;
        for (int64_t i = 0; i < depth(net, t); i++) {
            int64_t width = width_of(net, t, i);
            widest = width > widest ? width : widest;
            all += width;
            turned += i ? width * below(net, t, i) : 0;
        }
        Work w;
        w.totals = (double *)at, at += 2 * (2 * net->size + 1); /* first, where numpy aligns */
        w.inputs = at, at += BLOCK * net->inputs;
        w.hidden = at, at += BLOCK * all;
        w.slopes = at, at += net->activation < GELU ? 0 : BLOCK * all;
        w.head = at, at += BLOCK * net->size;
        w.of_head = at, at += BLOCK * net->size;
        w.p = at, at += BLOCK * net->size;
        w.value = at, at += BLOCK;
        w.of_value = at, at += BLOCK;
        w.gradient[0] = at, at += BLOCK * widest;
        w.gradient[1] = at, at += BLOCK * widest;
        w.transposed = at, at += turned;
        w.deviation = at, at += net->deviations;
        at = begin + (at - begin + 15) / 16 * 16; /* to the next line of the caches */
        if (works)
            works[t] = w;
    }
    return at - begin;
}

/* Where the results of a layer lie in those of all. */
static int64_t result_place(const Network *net, int64_t tower, int64_t layer)
{
    int64_t place = 0;
    for (int64_t i = 0; i < layer; i++)
        place += BLOCK * width_of(net, tower, i);
    return place;
}

/* Columns of a tower's inputs that it sees. */
static int64_t seen_by(const Network *net, int64_t tower, int64_t layer)
{
    return layer == 0 && tower == 0 ? net->seen : below(net, tower, layer);
}

static int has_actor(int64_t tower) { return tower == 0; }

static int has_critic(const Network *net, int64_t tower) { return tower == net->towers - 1; }

/* A tower's layers and heads for the n <= BLOCK rows of x [n, inputs]; return its last layer. */
static const float *forward(const Network *net, const Work *w, int64_t tower, const float *x, int64_t n)
{
    Places at = places(net, net->weights);
    const float *last = x;
    float *h = w->hidden, *slopes = w->slopes;
    int64_t in = net->inputs;
    for (int64_t i = 0; i < depth(net, tower); i++) {
        int64_t out = width_of(net, tower, i);
        product(n, out, seen_by(net, tower, i), last, in, 1, net->weights + weight_place(net, tower, i), out,
                net->weights + bias_place(net, tower, i), 0, h, out);
        activate(n * out, net->activation, h, slopes);
        last = h, h += BLOCK * out, slopes += BLOCK * out, in = out;
    }
    for (int64_t r = 0; r < n && has_actor(tower); r++)
        for (int64_t k = 0; k < net->size; k++)
            w->head[r * net->size + k] = dot(in, last + r * in, at.actor + k * in) + at.actor_bias[k];
    for (int64_t r = 0; r < n && has_critic(net, tower); r++)
        w->value[r] = dot(in, last + r * in, at.critic) + *at.critic_bias;
    return last;
}

static void forbid(const Network *net, const uint8_t *forbidden, float *head)
{
    if (forbidden)
        for (int64_t k = 0; k < net->size; k++)
            head[k] = forbidden[k] ? FORBIDDEN : head[k];
}

/* ---- distributions; head, p and of_head are those of one row ---- */

static float largest(int64_t n, const float *x)
{
    float most = x[0];
    for (int64_t k = 1; k < n; k++)
        most = x[k] > most || x[k] != x[k] ? x[k] : most; /* NaN wins, as in numpy */
    return most;
}

static float softplus(float x)
{
    return (x > 0 || x != x ? x : 0) + log1pf(expf(-fabsf(x)));
}

static int64_t deviations(const Leaf *leaf) { return leaf->kind == GAUSSIAN ? leaf->size : 0; }

static double evaluate_leaf(const Leaf *leaf, const int32_t *action, const float *log_std, const float *inverse,
                            float *head, float *p, float *entropy)
{
    double log_prob = 0, total = 0;
    *entropy = 0;
    if (leaf->kind == CATEGORICAL) {
        const int32_t *chosen = action;
        for (int64_t b = 0; b < leaf->branches; head += leaf->sizes[b], p += leaf->sizes[b], b++) {
            int64_t n = leaf->sizes[b];
            float most = largest(n, head), sum = 0, plus = 0;
            for (int64_t k = 0; k < n; k++)
                sum += p[k] = expf(head[k] -= most);
            float log_sum = logf(sum);
            for (int64_t k = 0; k < n; k++) {
                p[k] /= sum;
                head[k] -= log_sum;
                plus -= p[k] * head[k];
            }
            log_prob += head[chosen[b]];
            *entropy += plus;
        }
    } else if (leaf->kind == BERNOULLI) {
        const int32_t *ones = action;
        for (int64_t k = 0; k < leaf->size; k++) {
            float e = expf(-fabsf(head[k])), soft = softplus(head[k]);
            p[k] = (head[k] < 0 ? e : 1) / (e + 1);
            *entropy += soft - head[k] * p[k];
            log_prob += ones[k] * head[k] - soft;
        }
    } else {
        const float *given = (const float *)action;
        for (int64_t k = 0; k < leaf->size; k++) {
            head[k] = (given[k] - head[k]) * inverse[k]; /* the noise */
            log_prob -= 0.5 * head[k] * head[k];
            total += log_std[k];
        }
        log_prob -= total + leaf->size * HALF_LOG_TWO_PI;
        *entropy = (float)(total + leaf->size * (HALF_LOG_TWO_PI + 0.5));
    }
    return log_prob;
}

/* Return log_prob and write entropy, sums over the leaves; head becomes what `differentiate` needs. */
static double evaluate(const Network *net, const int32_t *action, const float *log_std, const float *inverse,
                       float *head, float *p, float *entropy)
{
    double log_prob = 0;
    *entropy = 0;
    for (const Leaf *leaf = net->actions; leaf < net->actions + net->leaves; leaf++) {
        float own;
        log_prob += evaluate_leaf(leaf, action, log_std, inverse, head, p, &own);
        *entropy += own;
        action += leaf->branches, head += leaf->size, p += leaf->size;
        log_std += deviations(leaf), inverse += deviations(leaf);
    }
    return log_prob;
}

static void differentiate_leaf(const Leaf *leaf, const int32_t *action, const float *inverse, float of_log_prob,
                               float of_entropy, const float *head, float *p, float *of_head)
{
    if (leaf->kind == CATEGORICAL) {
        const int32_t *chosen = action;
        for (int64_t b = 0; b < leaf->branches; b++) {
            int64_t n = leaf->sizes[b];
            float entropy = 0;
            for (int64_t k = 0; k < n; k++) {
                of_head[k] = -p[k] * of_log_prob;
                entropy -= p[k] * head[k];
            }
            of_head[chosen[b]] += of_log_prob;
            if (of_entropy != 0)
                for (int64_t k = 0; k < n; k++)
                    of_head[k] -= (head[k] + entropy) * p[k] * of_entropy;
            head += n, p += n, of_head += n;
        }
    } else if (leaf->kind == BERNOULLI) {
        const int32_t *ones = action;
        for (int64_t k = 0; k < leaf->size; k++) {
            of_head[k] = (ones[k] - p[k]) * of_log_prob;
            if (of_entropy != 0)
                of_head[k] -= head[k] * p[k] * (1 - p[k]) * of_entropy;
        }
    } else {
        for (int64_t k = 0; k < leaf->size; k++) {
            of_head[k] = head[k] * inverse[k] * of_log_prob;
            p[k] = (head[k] * head[k] - 1) * of_log_prob + of_entropy; /* of log_std */
        }
    }
}

static void differentiate(const Network *net, const int32_t *action, const float *inverse, float of_log_prob,
                          float of_entropy, const float *head, float *p, float *of_head)
{
    for (const Leaf *leaf = net->actions; leaf < net->actions + net->leaves; leaf++) {
        differentiate_leaf(leaf, action, inverse, of_log_prob, of_entropy, head, p, of_head);
        action += leaf->branches, inverse += deviations(leaf);
        head += leaf->size, p += leaf->size, of_head += leaf->size;
    }
}

/* ---- the gradient of a minibatch ---- */

static void transpose(const Network *net, const Work *w, int64_t tower)
{
    float *out = w->transposed;
    for (int64_t i = 1; i < depth(net, tower); i++) {
        int64_t in = below(net, tower, i), width = width_of(net, tower, i), b = 0;
        const float *own = net->weights + weight_place(net, tower, i);
        for (; b + 4 <= width; b += 4) /* squares of 4, which the compiler turns in registers */
            for (int64_t a = 0; a + 4 <= in; a += 4) {
                float square[4][4];
                for (int k = 0; k < 4; k++)
                    memcpy(square[k], own + (a + k) * width + b, sizeof square[k]);
                for (int k = 0; k < 4; k++)
                    for (int l = 0; l < 4; l++)
                        out[(b + k) * in + a + l] = square[l][k];
            }
        for (int64_t c = 0; c < width; c++) /* what is left of the rows, and whole ones */
            for (int64_t a = c < b ? in / 4 * 4 : 0; a < in; a++)
                out[c * in + a] = own[a * width + c];
        out += in * width;
    }
}

/* of_bias += the sum of the n rows of g, column by column: the sums stay in registers. */
#define ADD_COLUMNS(VECTOR, COUNT)                                                                  \
    for (int64_t each = COUNT * sizeof(VECTOR) / sizeof(float); j + each <= width; j += each) {     \
        VECTOR sums[COUNT];                                                                         \
        memset(sums, 0, sizeof sums);                                                               \
        for (int64_t r = 0; r < n; r++)                                                             \
            for (int i = 0; i < COUNT; i++)                                                         \
                sums[i] += ((const VECTOR *)(g + r * width + j))[i];                                \
        for (int i = 0; i < COUNT; i++)                                                             \
            ((VECTOR *)(of_bias + j))[i] += sums[i];                                                \
    }

static void add_rows(int64_t n, int64_t width, const float *g, float *of_bias)
{
    int64_t j = 0;
    ADD_COLUMNS(wide, 4)
    ADD_COLUMNS(wide, 1)
    ADD_COLUMNS(one, 1)
}

/* totals += the sum of the n rows of g. What few numbers are made of many rows that cancel out is
   summed in 64 bits. */
static void total_rows(int64_t n, int64_t width, const float *g, double *totals)
{
    for (int64_t j = 0; j < width; j++) {
        double total = totals[j];
        for (int64_t r = 0; r < n; r++)
            total += g[r * width + j];
        totals[j] = total;
    }
}

/* Add the gradient of a tower's layers; of_last [n, width], in w->gradient[0], is overwritten. */
static void backward(const Network *net, const Work *w, int64_t tower, const float *x, int64_t n, float *out)
{
    int64_t turn = 0, layers = depth(net, tower);
    const float *turned = w->transposed;
    for (int64_t i = 1; i < layers; i++)
        turned += width_of(net, tower, i) * below(net, tower, i);
    for (int64_t i = layers - 1; i >= 0; i--) {
        int64_t in = i ? below(net, tower, i) : net->inputs, width = width_of(net, tower, i);
        int64_t place = result_place(net, tower, i);
        float *g = w->gradient[turn], *of_weight = out + weight_place(net, tower, i);
        deactivate(n * width, net->activation, w->hidden + place, w->slopes + place, g);
        add_rows(n, width, g, out + bias_place(net, tower, i));
        product(seen_by(net, tower, i), width, n, i ? w->hidden + result_place(net, tower, i - 1) : x, 1, in, g, width,
                of_weight, width, of_weight, width);
        if (i) {
            turned -= width * in;
            product(n, in, width, g, width, 1, turned, in, NULL, 0, w->gradient[!turn], in);
            turn = !turn;
        }
    }
}

/* The policy's loss of one row: adds its parts to sums, returns its derivative with respect to
   log π(a). */
static float surrogate(const Loss *loss, float log_ratio, float advantage, double *sums)
{
    float clip = (float)loss->clip, excess = expm1f(log_ratio);
    float held = excess < -clip ? -clip : excess > clip ? clip : excess;
    float gain = (excess + 1) * advantage, cut = (held + 1) * advantage;
    sums[POLICY] -= gain <= cut || gain != gain ? gain : cut;
    sums[KL] += excess - log_ratio;
    sums[CLIPPED] += fabsf(excess) > clip;
    return gain <= cut ? -gain : 0;
}

/* The value's, and its derivative with respect to the value. */
static float value_loss(const Loss *loss, float value, float target, float old, double *sums)
{
    float error = value - target, square = error * error, of_value = error;
    if (loss->clip_value >= 0) {
        float limit = (float)loss->clip_value, move = value - old;
        float near = old + (move < -limit ? -limit : move > limit ? limit : move) - target;
        if (near * near > square || near != near) {
            of_value = fabsf(move) > limit ? 0 : error;
            square = near * near;
        }
    }
    sums[VALUE] += 0.5f * square;
    return of_value;
}

/* A minibatch: the n picked rows, whose loss is summed and multiplied by weight. What each tower
   writes lies on lines of the caches of its own: a line that two cores write takes them as long to
   hand over as some rows. */
typedef struct {
    Network nets[2]; /* each tower's: they differ in where the weights lie */
    const Rows *rows;
    const Loss *loss;
    const int64_t *picked;
    int64_t n;
    double weight;
    float *out[2];   /* the gradient, where each tower writes it */
    Work works[2];   /* of the towers */
    _Alignas(128) double sums[2][16]; /* of each tower: the parts of the loss, and SQUARES */
} Minibatch;

static Minibatch minibatch_of(const Network *net, const Rows *rows, const Loss *loss, double weight, float *out)
{
    Minibatch m = {.nets = {*net, *net}, .rows = rows, .loss = loss, .weight = weight, .out = {out, out}};
    plan(net, net->scratch, m.works);
    return m;
}

static void actor_loss(const Minibatch *m, const Work *w, const int64_t *picked, int64_t n, double *sums)
{
    const Network *net = m->nets;
    const Rows *rows = m->rows;
    int64_t size = net->size;
    const float *log_std = places(net, net->weights).log_std;
    float weight = (float)m->weight, of_entropy = (float)(-m->loss->entropy_coefficient * weight);
    for (int64_t k = 0; k < net->deviations; k++)
        w->deviation[k] = expf(-log_std[k]);
    for (int64_t r = 0; r < n; r++) {
        int64_t row = picked[r];
        const uint8_t *forbidden = rows->forbidden ? rows->forbidden + row * size : NULL;
        const int32_t *action = rows->action + row * net->branches;
        float *head = w->head + r * size, *p = w->p + r * size, *of_head = w->of_head + r * size, entropy;
        forbid(net, forbidden, head);
        double log_prob = evaluate(net, action, log_std, w->deviation, head, p, &entropy);
        float of_log_prob =
            surrogate(m->loss, (float)(log_prob - rows->log_prob[row]), rows->advantage[row], sums);
        sums[ENTROPY] += entropy;
        differentiate(net, action, w->deviation, of_log_prob * weight, of_entropy, head, p, of_head);
        if (forbidden)
            for (int64_t k = 0; k < size; k++)
                of_head[k] = forbidden[k] ? 0 : of_head[k];
    }
}

static void critic_loss(const Minibatch *m, const Work *w, const int64_t *picked, int64_t n, double *sums)
{
    float weight = (float)m->weight, scale = (float)(weight * m->loss->value_coefficient);
    for (int64_t r = 0; r < n; r++) {
        int64_t row = picked[r];
        w->of_value[r] = scale * value_loss(m->loss, w->value[r], m->rows->target[row], m->rows->value[row], sums);
    }
}

/* Add a tower's gradient of the rows x of a block and its parts of their loss. */
static void block(const Minibatch *m, int64_t tower, const int64_t *picked, const float *x, int64_t n, double *sums)
{
    const Network *net = m->nets + tower;
    const Work *w = m->works + tower;
    Places at = places(net, net->weights), of = places(net, m->out[tower]);
    int64_t size = net->size, width = last_width(net, tower);
    float *g = w->gradient[0];
    const float *last = forward(net, w, tower, x, n);
    if (has_actor(tower)) {
        actor_loss(m, w, picked, n, sums);
        product(size, width, n, w->of_head, 1, size, last, width, of.actor, width, of.actor, width);
        total_rows(n, size, w->of_head, w->totals);
        if (net->deviations)
            total_rows(n, size, w->p, w->totals + size + 1);
        if (depth(net, tower))
            product(n, width, size, w->of_head, size, 1, at.actor, width, NULL, 0, g, width);
    }
    if (has_critic(net, tower)) {
        critic_loss(m, w, picked, n, sums);
        product(1, width, n, w->of_value, 1, 1, last, width, of.critic, width, of.critic, width);
        total_rows(n, 1, w->of_value, w->totals + size);
        if (depth(net, tower))
            product(n, width, 1, w->of_value, 1, 1, at.critic, width, tower ? NULL : g, width, g, width);
    }
    if (depth(net, tower))
        backward(net, w, tower, x, n, m->out[tower]);
}

/* A tower's weights lie in pieces: where the one of this number begins in all weights, and how
   many numbers it has, or -1 behind the last one. */
static int64_t piece(const Network *net, int64_t tower, int64_t number, int64_t *begin)
{
    int64_t layers = depth(net, tower), layer = number / 2, critic = net->towers - 1;
    if (layer < layers) {
        *begin = number % 2 ? bias_place(net, tower, layer) : weight_place(net, tower, layer);
        return (number % 2 ? 1 : below(net, tower, layer)) * width_of(net, tower, layer);
    }
    number -= 2 * layers;
    int64_t sizes[] = {net->size * (last_width(net, 0) + 1), last_width(net, critic) + 1, net->deviations};
    if (number > 2)
        return -1;
    *begin = layer_place(net, critic, depth(net, critic)) + (number ? sizes[0] : 0) + (number > 1 ? sizes[1] : 0);
    return (number == 1 ? has_critic(net, tower) : has_actor(tower)) ? sizes[number] : 0;
}

/* Write the gradient of the towers first … end - 1, and their parts of the loss. */
static void gradient(Minibatch *m, int64_t first, int64_t end)
{
    const Network *net = m->nets + first;
    float *x = m->works[first].inputs;
    for (int64_t t = first; t < end; t++) {
        int64_t begin;
        for (int64_t i = 0, n; (n = piece(net, t, i, &begin)) >= 0; i++)
            memset(m->out[t] + begin, 0, n * sizeof *m->out[t]);
        memset(m->works[t].totals, 0, (2 * net->size + 1) * sizeof(double));
        memset(m->sums[t], 0, sizeof m->sums[t]);
        transpose(m->nets + t, m->works + t, t);
    }
    for (int64_t at = 0; at < m->n; at += BLOCK) {
        int64_t n = m->n - at < BLOCK ? m->n - at : BLOCK;
        for (int64_t r = 0; r < n; r++)
            memcpy(x + r * net->inputs, m->rows->features + m->picked[at + r] * net->inputs,
                   net->inputs * sizeof(float));
        for (int64_t t = first; t < end; t++)
            block(m, t, m->picked + at, x, n, m->sums[t]);
    }
    for (int64_t t = first; t < end; t++) {
        Places of = places(net, m->out[t]);
        const double *totals = m->works[t].totals, *of_deviations = totals + net->size + 1;
        const Leaf *end_of_leaves = net->actions + (has_actor(t) ? net->leaves : 0);
        for (int64_t k = 0; k < net->size && has_actor(t); k++)
            of.actor_bias[k] = (float)totals[k];
        for (const Leaf *leaf = net->actions; leaf < end_of_leaves; of_deviations += leaf->size, leaf++)
            for (int64_t k = 0; k < deviations(leaf); k++)
                *of.log_std++ = (float)of_deviations[k];
        if (has_critic(net, t))
            *of.critic_bias = (float)totals[net->size];
    }
}

/* The parts of the loss [PARTS], of all towers. */
static void parts_of(const Minibatch *m, float *parts)
{
    for (int i = 0; i < PARTS; i++) {
        double sum = i == ROWS ? m->n : m->sums[0][i] + (m->nets->towers > 1 ? m->sums[1][i] : 0);
        parts[i] = (float)(sum * m->weight);
    }
}

/* Write the gradient of the PPO loss, summed over the n picked rows and times weight, into out,
   and the parts of the loss (and the rows) times weight into parts [PARTS]. */
void EXPORT(ppo)(const Network *net, const Rows *rows, const Loss *loss, const int64_t *picked, int64_t n,
                 double weight, float *out, float *parts)
{
    Minibatch m = minibatch_of(net, rows, loss, weight, out);
    m.picked = picked, m.n = n;
    gradient(&m, 0, net->towers);
    parts_of(&m, parts);
}

/* ---- acting ---- */

/* Choose an action by noise, or the mode; return its log-probability. `stride` is between a row's
   random numbers, but for GAUSSIAN; head is overwritten. */
static float choose_leaf(const Leaf *leaf, int mode, const float *noise, int64_t stride, const float *log_std,
                         const float *deviation, float *head, float *p, int32_t *action)
{
    float log_prob = 0, total = 0;
    if (leaf->kind == CATEGORICAL) {
        int32_t *chosen = action;
        for (int64_t b = 0; b < leaf->branches; head += leaf->sizes[b], p += leaf->sizes[b], b++) {
            int64_t n = leaf->sizes[b], pick = 0;
            float most = largest(n, head), sum = 0;
            for (int64_t k = 0; k < n; k++)
                p[k] = sum += expf(head[k] -= most);
            if (mode)
                while (pick < n - 1 && head[pick] < 0) /* the first that is the largest, or NaN */
                    pick++;
            else
                for (int64_t k = 0; k < n - 1; k++)
                    pick += p[k] <= noise[b * stride] * sum;
            chosen[b] = (int32_t)pick;
            log_prob += head[pick] - logf(sum);
        }
    } else if (leaf->kind == BERNOULLI) {
        int32_t *ones = action;
        for (int64_t k = 0; k < leaf->size; k++) {
            ones[k] = mode ? head[k] > 0 : noise[k * stride] * (1 + expf(-head[k])) < 1;
            log_prob -= softplus(ones[k] ? -head[k] : head[k]);
        }
    } else {
        float *chosen = (float *)action;
        for (int64_t k = 0; k < leaf->size; k++) {
            float x = mode ? 0 : noise[k];
            chosen[k] = head[k] + deviation[k] * x;
            log_prob += x * x;
            total += log_std[k];
        }
        log_prob = -0.5f * log_prob - (total + (float)(leaf->size * HALF_LOG_TWO_PI));
    }
    return log_prob;
}

/* The same of all leaves; noise is that of all n rows, of which this one is `row`. */
static float choose(const Network *net, int mode, const float *noise, int64_t row, int64_t n, const float *log_std,
                    const float *deviation, float *head, float *p, int32_t *action)
{
    float log_prob = 0;
    for (const Leaf *leaf = net->actions; leaf < net->actions + net->leaves; leaf++) {
        const float *own = noise ? noise + (leaf->kind == GAUSSIAN ? row * leaf->size : row) : NULL;
        log_prob += choose_leaf(leaf, mode, own, n, log_std, deviation, head, p, action);
        noise = noise ? noise + n * leaf->branches : NULL;
        action += leaf->branches, head += leaf->size, p += leaf->size;
        log_std += deviations(leaf), deviation += deviations(leaf);
    }
    return log_prob;
}

/* n rows to act on: features [n, inputs]; noise, leaf after leaf: uniform [branches, n], of GAUSSIAN
   standard normal [n, size]; modes: bool [n], or NULL: all rows are as mode. What is told: actions
   [n, branches] as a Leaf says, log-probabilities, and values times scale. */
typedef struct {
    const float *features, *noise;
    const uint8_t *forbidden, *modes;
    int32_t *action;
    float *log_prob, *value;
    int64_t n, mode;
    float scale;
} Acting;

void EXPORT(act)(const Network *net, const Acting *a)
{
    const float *noise = a->noise;
    int64_t n = a->n;
    Work works[2], *w = works, *critic = works + net->towers - 1;
    plan(net, net->scratch, works);
    Places at = places(net, net->weights);
    int64_t size = net->size;
    for (int64_t k = 0; k < net->deviations; k++)
        w->deviation[k] = expf(at.log_std[k]);
    for (int64_t first = 0; first < n; first += BLOCK) {
        int64_t count = n - first < BLOCK ? n - first : BLOCK;
        for (int64_t t = 0; t < net->towers; t++)
            forward(net, works + t, t, a->features + first * net->inputs, count);
        for (int64_t r = 0; r < count; r++) {
            int64_t row = first + r;
            forbid(net, a->forbidden ? a->forbidden + row * size : NULL, w->head + r * size);
            a->log_prob[row] =
                choose(net, a->modes ? a->modes[row] : a->mode != 0, noise, row, n, at.log_std, w->deviation,
                       w->head + r * size, w->p + r * size, a->action + row * net->branches);
            a->value[row] = critic->value[r] * a->scale;
        }
    }
}

/* ---- Adam ---- */

static double squares(int64_t n, const float *g)
{
    double sums[8] = {0}, sum = 0;
    int64_t i = 0;
    for (; i + 8 <= n; i += 8)
        for (int l = 0; l < 8; l++)
            sums[l] += (double)g[i + l] * g[i + l];
    for (; i < n; i++)
        sum += (double)g[i] * g[i];
    for (int l = 0; l < 8; l++)
        sum += sums[l];
    return sum;
}

/* Σ g², rounded to float as numpy's is: it is infinite where that would be. */
double EXPORT(square)(int64_t n, const float *g) { return (float)squares(n, g); }

/* One step of algorithms/adam.py; its `_step` says what the factors are. */
void EXPORT(adam)(int64_t n, float *restrict weights, const float *restrict gradient, float *restrict first,
                  float *restrict second, const float *factors)
{
    float into_second = factors[0], into_first = factors[1], epsilon = factors[2], size = factors[3];
    float beta1 = factors[4], beta2 = factors[5];
    for (int64_t i = 0; i < n; i++) {
        float g = gradient[i] * into_second;
        second[i] = second[i] * beta2 + g * g;
        first[i] = first[i] * beta1 + g * into_first;
        weights[i] -= first[i] / (sqrtf(second[i]) + epsilon) * size;
    }
}

/* What a descent changes: the weights, their gradient, and Adam's moments. */
typedef struct {
    float *weights, *gradient, *first, *second;
} Descending;

/* A descent by Adam: what it has come to, and how it goes on. */
typedef struct {
    int64_t size, steps, apart;             /* numbers of the weights; steps so far; limit is each tower's */
    Descending all;                         /* behind the gradient lie PARTS numbers */
    double rate, epsilon, limit, target_kl; /* limit of the norm, and KL, < 0: none */
    float *spare;                           /* 4 (size + 2 LINE) numbers, or NULL: see ppo_epoch */
} Descent;

#define LINE 16 /* numbers of a line of the caches */

/* An epoch's minibatch, and the step by the one before. */
typedef struct {
    Minibatch minibatch;
    Descending of[2];  /* each tower's, of which it changes its own pieces */
    int64_t parts;     /* that the towers are dealt out in */
    int64_t due;       /* whether there is a step to be done */
    float shrink[2];   /* of each tower's gradient, before the step */
    float factors[6];
} Epoch;

static void set_factors(Epoch *e, Descent *d, double scale)
{
    const double beta1 = 0.9, beta2 = 0.999;
    d->steps++;
    double root = sqrt(1 - pow(beta2, (double)d->steps));
    float factors[] = {(float)(scale * sqrt(1 - beta2)), (float)((1 - beta1) / sqrt(1 - beta2)),
                       (float)(d->epsilon * root), (float)(d->rate * root / (1 - pow(beta1, (double)d->steps))),
                       (float)beta1, (float)beta2};
    memcpy(e->factors, factors, sizeof factors);
    e->due = 1;
}

/* Some towers' part of an epoch's minibatch: the step that is due, and the gradient after it. */
static void part_of(const void *job, int64_t part)
{
    Epoch *e = (Epoch *)job;
    Minibatch *m = &e->minibatch;
    const Network *net = m->nets;
    int64_t towers = net->towers / e->parts, first = part * towers, at;
    for (int64_t t = first; t < first + towers && e->due; t++) {
        Descending d = e->of[t];
        for (int64_t i = 0, n; (n = piece(net, t, i, &at)) >= 0; i++) {
            for (int64_t k = 0; k < n && e->shrink[t] < 1; k++)
                d.gradient[at + k] *= e->shrink[t];
            JOIN(tidemill_adam, ISA)(n, d.weights + at, d.gradient + at, d.first + at, d.second + at, e->factors);
        }
    }
    if (!m->picked)
        return;
    gradient(m, first, first + towers);
    for (int64_t t = first; t < first + towers; t++)
        for (int64_t i = 0, n; (n = piece(net, t, i, &at)) >= 0; i++)
            m->sums[t][SQUARES] += squares(n, m->out[t] + at);
}

static int64_t go_through(Epoch *e, const int64_t *picked, const int64_t *bounds, int64_t count, Descent *d,
                          float *found)
{
    Minibatch *m = &e->minibatch;
    const Loss *loss = m->loss;
    float *parts = d->all.gradient + d->size;
    int apart = d->apart && d->limit >= 0 && m->nets->towers == 2;
    for (int64_t k = 0; k < count; k++, found += PARTS) {
        m->picked = picked + bounds[k], m->n = bounds[k + 1] - bounds[k];
        spread(part_of, e, e->parts, 1);
        e->due = 0;
        parts_of(m, parts);
        double share = parts[ROWS], first = m->sums[0][SQUARES], second = m->sums[1][SQUARES];
        for (int i = 0; i < ROWS; i++)
            found[i] = parts[i] / parts[ROWS];
        if (d->target_kl >= 0 && found[KL] > d->target_kl)
            return k;
        float whole = found[POLICY] + (float)loss->value_coefficient * found[VALUE] -
                      (float)loss->entropy_coefficient * found[ENTROPY];
        double one = sqrt((float)first) / share, other = sqrt((float)second) / share;
        double norm = apart ? sqrt(one * one + other * other) : sqrt((float)(first + second)) / share;
        found[ROWS] = (float)norm;
        if (!isfinite(norm) || !isfinite(whole))
            return k + 1;
        int clipped = d->limit >= 0 && norm > d->limit;
        e->shrink[0] = clipped && apart && one > d->limit ? (float)(d->limit / one) : 1;
        e->shrink[1] = clipped && apart && other > d->limit ? (float)(d->limit / other) : 1;
        set_factors(e, d, (clipped && !apart ? d->limit / norm : 1) / share);
    }
    m->picked = NULL;
    spread(part_of, e, e->parts, 1);
    return count;
}

/* The actor's pieces of what a descent changes. */
static void copy_actor(const Network *net, const Descending *from, const Descending *to)
{
    for (int64_t i = 0, n, at; (n = piece(net, 0, i, &at)) >= 0; i++) {
        memcpy(to->weights + at, from->weights + at, n * sizeof(float));
        memcpy(to->gradient + at, from->gradient + at, n * sizeof(float));
        memcpy(to->first + at, from->first + at, n * sizeof(float));
        memcpy(to->second + at, from->second + at, n * sizeof(float));
    }
}

/* An epoch of a trainer alone as algorithms/policy_gradient.py goes through it: `count`
   minibatches, the picked rows from each of `bounds` to the next. Write the parts of each one's
   loss and its gradient's norm into found [count, PARTS]; return how many there are: it ends before
   one whose KL is too large, and with one that is not finite, which changes no weight. Where there
   are helpers, each tower is one thread's, and what the actor's changes lies in the descent's spare
   numbers meanwhile: what a core reads ahead of its own would else be taken from the other one. */
int64_t EXPORT(ppo_epoch)(const Network *net, const Rows *rows, const Loss *loss, const int64_t *picked,
                          const int64_t *bounds, int64_t count, double weight, Descent *d, float *found)
{
    Epoch e = {.of = {d->all, d->all}, .parts = has_helpers() ? net->towers : 1};
    e.minibatch = minibatch_of(net, rows, loss, weight, d->all.gradient);
    int moved = e.parts == 2 && d->spare;
    if (moved) {
        int64_t each = (d->size / LINE + 2) * LINE;
        e.of[0] = (Descending){d->spare, d->spare + each, d->spare + 2 * each, d->spare + 3 * each};
        copy_actor(net, &d->all, e.of);
        e.minibatch.nets[0].weights = e.of[0].weights, e.minibatch.out[0] = e.of[0].gradient;
    }
    int64_t done = go_through(&e, picked, bounds, count, d, found);
    if (moved)
        copy_actor(net, e.of, &d->all);
    return done;
}

int64_t EXPORT(scratch)(const Network *net) { return plan(net, NULL, NULL); }

int64_t EXPORT(digest)(void) { return DIGEST; }

#ifdef FIRST /* the file's compilation for any processor of the architecture */
/* Return how many of the instruction sets baseline, AVX2, AVX-512 the processor has. */
__attribute__((visibility("default"))) int64_t tidemill_instruction_sets(void)
{
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma"))
        return 1;
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") &&
                   __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512bw")
               ? 3
               : 2;
#else
    return 1;
#endif
}

/* The words by which processes tell each other what lies in the memory that they share. Fences
   beside the acquiring load and the releasing store: of a value that is rewritten while it is
   copied, the copy is read before the mark that says so, and a mark is written before what it
   announces. On x86-64 both are plain moves. */
__attribute__((visibility("default"))) uint64_t tidemill_read_word(const uint64_t *word)
{
    __atomic_thread_fence(__ATOMIC_ACQUIRE);
    return __atomic_load_n(word, __ATOMIC_ACQUIRE);
}

__attribute__((visibility("default"))) void tidemill_write_word(uint64_t *word, uint64_t value)
{
    __atomic_store_n(word, value, __ATOMIC_RELEASE);
    __atomic_thread_fence(__ATOMIC_RELEASE);
}
#endif
