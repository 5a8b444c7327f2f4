/* Plain layers of several networks of the same shapes side by side (towers), forward and backward:
   what DQN and SAC are made of. numpy's code (nets/mlp.py) is the reference.

   Work is cut into tasks, panels of a product's columns, that threads (threads.c) take as they
   come. Each number is computed by one thread in the same order, so that results are the same to
   the bit with any number of threads. See kernels.c for what may be rounded otherwise; sums of
   products go over DEPTH terms in order, and those sums are added. */

#include <stddef.h>
#include <string.h>

#include "activations.h"
#include "layers.h"
#include "threads.h"

#define WORTH 6000000 /* products and sums from which a second thread is worth a hand-over */

enum { PANEL = 2 * LANES, DEPTH = 256, TALL = LANES == 16 ? 8 : 6, TOWERS = 4 };

/* ---- products of matrices ---- */

/* c [m, n] = Σ_p a(i, p) b(p, j) + bias [n], a(i, p) at a[i · row + p · step], b(p, j) at
   b[p · ldb + j], or, turned, at b[j · ldb + p]; then relu, or times 1 where mask [m, n] is above 0
   and else 0. sums [n]: Σ_p b(p, j). Where there are `rows` [m], these rows of a, c and mask alone. */
typedef struct {
    int64_t m, n, k;
    const int64_t *rows;
    const float *a;
    int64_t row, step;
    const float *b;
    int64_t ldb, turned;
    float *c;
    const float *bias;
    int64_t relu;
    const float *mask;
    float *sums;
} Product;

/* Copy columns of b, zeros behind them, so that a row of them is two vectors. */
static void pack(const Product *p, int64_t first, int64_t depth, int64_t j, int64_t columns, float *restrict panel)
{
    const float *b = p->b + (p->turned ? j * p->ldb + first : first * p->ldb + j);
    int64_t c = 0, rows = p->turned ? depth / 4 * 4 : depth;
    if (columns < PANEL)
        memset(panel, 0, depth * PANEL * sizeof *panel);
    if (p->turned) {
        for (; c + 4 <= columns; c += 4, b += 4 * p->ldb) { /* squares of 4, which the compiler turns in registers */
            for (int64_t q = 0; q < rows; q += 4) {
                float square[4][4];
                for (int i = 0; i < 4; i++)
                    memcpy(square[i], b + i * p->ldb + q, sizeof square[i]);
                for (int i = 0; i < 4; i++)
                    for (int l = 0; l < 4; l++)
                        panel[(q + i) * PANEL + c + l] = square[l][i];
            }
            for (int64_t q = rows; q < depth; q++)
                for (int i = 0; i < 4; i++)
                    panel[q * PANEL + c + i] = b[i * p->ldb + q];
        }
        for (; c < columns; c++, b += p->ldb)
            for (int64_t q = 0; q < depth; q++)
                panel[q * PANEL + c] = b[q];
    } else if (columns < PANEL)
        for (int64_t q = 0; q < depth; q++)
            memcpy(panel + q * PANEL, b + q * p->ldb, columns * sizeof *panel);
    else
        for (int64_t q = 0; q < depth; q++)
            memcpy(panel + q * PANEL, b + q * p->ldb, PANEL * sizeof *panel);
}

/* TALL rows of a, from `at` on, times the first `parts` vectors of a panel. */
static inline void tile(int64_t k, const float *const at[TALL], int64_t step, const float *panel, int parts,
                        wide out[TALL][2])
{
    wide sum[TALL][2];
    _Pragma("GCC unroll 8") for (int i = 0; i < TALL; i++) sum[i][0] = sum[i][1] = (wide){0};
    int64_t off[TALL];
    _Pragma("GCC unroll 8") for (int i = 0; i < TALL; i++) off[i] = at[i] - at[0];
    for (const float *a = at[0]; k > 0; k--, panel += PANEL, a += step) {
        wide left = *(const wide *)panel, right = *(const wide *)(panel + LANES);
        _Pragma("GCC unroll 8") for (int i = 0; i < TALL; i++) {
            sum[i][0] += a[off[i]] * left;
            if (parts > 1)
                sum[i][1] += a[off[i]] * right;
        }
    }
    _Pragma("GCC unroll 8") for (int i = 0; i < TALL; i++) out[i][0] = sum[i][0], out[i][1] = sum[i][1];
}

/* What becomes of a row's sums x in a panel; `from` is what they are added to. */
static inline void finish(wide *x, const float *from, int relu, const float *mask, int64_t columns, float *c)
{
    const wide zero = {0};
    wide add[2] = {{0}}, masks[2] = {{0}};
    if (from)
        memcpy(add, from, columns * sizeof *from);
    if (mask)
        memcpy(masks, mask, columns * sizeof *mask);
    for (int h = 0; h < 2; h++) {
        x[h] += add[h];
        if (relu)
            x[h] = (wide)((bits)x[h] & ~(x[h] < zero)); /* NaN stays */
        if (mask)
            x[h] *= (wide)((bits)(zero + 1) & (masks[h] > zero));
    }
    memcpy(c, x, columns * sizeof *c);
}

static inline int64_t row_of(const Product *p, int64_t i) { return p->rows ? p->rows[i] : i; }

/* The columns of a panel from `j` on. */
static void panel_of(const Product *p, int64_t j)
{
    float panel[DEPTH * PANEL] __attribute__((aligned(64)));
    wide out[TALL][2];
    int64_t columns = p->n - j < PANEL ? p->n - j : PANEL;
    for (int64_t first = 0; first < p->k || !first; first += DEPTH) {
        int64_t depth = p->k - first < DEPTH ? p->k - first : DEPTH;
        int last = first + depth == p->k;
        pack(p, first, depth, j, columns, panel);
        if (p->sums) {
            wide sum[2] = {{0}};
            for (int64_t q = 0; q < depth; q++)
                for (int h = 0; h < 2; h++)
                    sum[h] += ((const wide *)(panel + q * PANEL))[h];
            finish(sum, first ? p->sums + j : NULL, 0, NULL, columns, p->sums + j);
        }
        for (int64_t i = 0; i < p->m; i += TALL) {
            int64_t rows = p->m - i < TALL ? p->m - i : TALL;
            const float *at[TALL];
            for (int64_t r = 0; r < TALL; r++)
                at[r] = p->a + row_of(p, i + (r < rows ? r : rows - 1)) * p->row + first * p->step;
            if (columns > LANES)
                tile(depth, at, p->step, panel, 2, out);
            else
                tile(depth, at, p->step, panel, 1, out);
            for (int64_t r = 0; r < rows; r++) {
                int64_t place = row_of(p, i + r) * p->n + j;
                const float *from = first ? p->c + place : p->bias ? p->bias + j : NULL;
                const float *mask = last && p->mask ? p->mask + place : NULL;
                if (columns == PANEL) /* a number that the compiler knows */
                    finish(out[r], from, last && p->relu, mask, PANEL, p->c + place);
                else
                    finish(out[r], from, last && p->relu, mask, columns, p->c + place);
            }
        }
    }
}

typedef struct {
    Product product[2 * TOWERS];
    int64_t count;
} Products;

static void panel_task(const void *job, int64_t number)
{
    const Product *p = ((const Products *)job)->product;
    for (int64_t panels; number >= (panels = (p->n + PANEL - 1) / PANEL); p++)
        number -= panels;
    panel_of(p, number * PANEL);
}

static void multiply(const Products *all)
{
    int64_t tasks = 0, work = 0;
    for (int64_t i = 0; i < all->count; i++) {
        const Product *p = all->product + i;
        tasks += (p->n + PANEL - 1) / PANEL;
        work += p->m * p->n * p->k;
    }
    spread(panel_task, all, tasks, work >= WORTH);
}

/* ---- normalised layers: Ba et al. 2016, "Layer Normalization"; nets/layer_norm.py is the reference ---- */

#define EPSILON 1e-5f

/* The sum over a row of a[i] · b[i]. */
static inline float along(int64_t width, const float *a, const float *b)
{
    wide sums = {0};
    int64_t i = 0;
    for (; i + LANES <= width; i += LANES)
        sums += *(const wide *)(a + i) * *(const wide *)(b + i);
    float sum = 0;
    for (int l = 0; l < LANES; l++)
        sum += sums[l];
    for (; i < width; i++)
        sum += a[i] * b[i];
    return sum;
}

static inline float total(int64_t width, const float *a)
{
    wide sums = {0};
    int64_t i = 0;
    for (; i + LANES <= width; i += LANES)
        sums += *(const wide *)(a + i);
    float sum = 0;
    for (int l = 0; l < LANES; l++)
        sum += sums[l];
    for (; i < width; i++)
        sum += a[i];
    return sum;
}

/* x [n, width] becomes scale · normal + shift, normal being (x - mean) · factor of each row. */
static void normalise(int64_t n, int64_t width, float *restrict x, const float *restrict scale,
                      const float *restrict shift, float *restrict normal, float *restrict factor)
{
    for (int64_t r = 0; r < n; r++, x += width, normal += width) {
        float mean = total(width, x) / (float)width;
        for (int64_t i = 0; i < width; i++)
            normal[i] = x[i] - mean;
        factor[r] = 1 / sqrtf(along(width, normal, normal) / (float)width + EPSILON);
        for (int64_t i = 0; i < width; i++) {
            normal[i] *= factor[r];
            x[i] = normal[i] * scale[i] + shift[i];
        }
    }
}

/* The gradient g [n, width] of what `normalise` made becomes that of x; of_scale and of_shift are
   written (NULL: not). */
static void denormalise(int64_t n, int64_t width, float *restrict g, const float *restrict scale,
                        const float *restrict normal, const float *restrict factor, float *restrict of_scale,
                        float *restrict of_shift)
{
    if (of_scale) {
        memset(of_scale, 0, width * sizeof *of_scale), memset(of_shift, 0, width * sizeof *of_shift);
        for (int64_t r = 0; r < n; r++)
            for (int64_t i = 0; i < width; i++) {
                of_scale[i] += g[r * width + i] * normal[r * width + i];
                of_shift[i] += g[r * width + i];
            }
    }
    for (int64_t r = 0; r < n; r++, g += width, normal += width) {
        for (int64_t i = 0; i < width; i++)
            g[i] *= scale[i];
        float mean = total(width, g) / (float)width, slope = along(width, g, normal) / (float)width;
        for (int64_t i = 0; i < width; i++)
            g[i] = (g[i] - mean - normal[i] * slope) * factor[r];
    }
}

/* ---- layers ---- */

static int64_t inputs_of(const Layers *net, int64_t layer) { return layer ? net->widths[layer - 1] : net->inputs; }

static int64_t size_of(const Layers *net, int64_t layer)
{
    int64_t vectors = net->normed && layer < net->layers - 1 ? 3 : 1;
    return net->towers * (inputs_of(net, layer) + vectors) * net->widths[layer];
}

/* How many numbers the layers before the last tell of n rows. */
static int64_t told(const Layers *net, int64_t n)
{
    int64_t all = 0;
    for (int64_t i = 0; i < net->layers - 1; i++)
        all += net->towers * n * net->widths[i];
    return all;
}

void EXPORT(forward)(const Layers *net, const float *x, int64_t n, float *hidden, float *out)
{
    const float *from = x, *weights = net->weights;
    int64_t slopes = told(net, n), normal = slopes * (1 + (net->activation >= GELU)), rows = net->towers * n;
    float *factors = hidden + normal + slopes;
    for (int64_t i = 0; i < net->layers; weights += size_of(net, i), i++) {
        int64_t in = inputs_of(net, i), width = net->widths[i], last = i == net->layers - 1;
        int64_t plain = last || net->activation != RELU || net->normed;
        float *to = last ? out : hidden;
        Products all = {.count = net->towers};
        for (int64_t t = 0; t < net->towers; t++)
            all.product[t] = (Product){.m = n, .n = width, .k = in,
                                       .a = from + (i ? t * n * in : 0), .row = in, .step = 1,
                                       .b = weights + t * in * width, .ldb = width, .c = to + t * n * width,
                                       .bias = weights + net->towers * in * width + t * width, .relu = !plain};
        multiply(&all);
        for (int64_t t = 0; t < net->towers && net->normed && !last; t++) {
            const float *scale = weights + net->towers * (in + 1) * width + t * width;
            normalise(n, width, hidden + t * n * width, scale, scale + net->towers * width,
                      hidden + normal + t * n * width, factors + i * rows + t * n);
        }
        if (!last && plain)
            activate(rows * width, net->activation, hidden, hidden + slopes);
        from = to, hidden += rows * width;
    }
}

void EXPORT(backward)(const Layers *net, const float *x, int64_t n, const float *hidden, const float *of_out,
                      float *spare, float *into, float *of_inputs)
{
    int64_t place = 0, widest = 0, slopes = told(net, n), relu = net->activation == RELU && !net->normed;
    int64_t normal = slopes * (1 + (net->activation >= GELU)), rows = net->towers * n;
    const float *g = of_out, *factors = hidden + normal + slopes;
    for (int64_t i = 0; i < net->layers; place += size_of(net, i), i++)
        if (i < net->layers - 1) {
            hidden += net->towers * n * net->widths[i];
            widest = net->widths[i] > widest ? net->widths[i] : widest;
        }
    for (int64_t i = net->layers - 1; i >= 0; i--) {
        int64_t in = inputs_of(net, i), width = net->widths[i];
        place -= size_of(net, i), hidden -= i ? net->towers * n * in : 0;
        float *below = i ? spare + (i % 2) * net->towers * n * widest : of_inputs;
        Products all = {0};
        for (int64_t t = 0; t < net->towers; t++) {
            const float *h = i ? hidden + t * n * in : x, *of = g + t * n * width;
            int64_t weight = place + t * in * width, bias = place + net->towers * in * width + t * width;
            if (into)
                all.product[all.count++] = (Product){.m = in, .n = width, .k = n, .a = h, .row = 1, .step = in,
                                                     .b = of, .ldb = width, .c = into + weight, .sums = into + bias};
            if (below)
                all.product[all.count++] = (Product){.m = n, .n = in, .k = width, .a = of, .row = width, .step = 1,
                                                     .b = net->weights + weight, .ldb = width, .turned = 1,
                                                     .c = below + t * n * in, .mask = i && relu ? h : NULL};
        }
        multiply(&all);
        if (i && !relu)
            deactivate(rows * in, net->activation, hidden, hidden + slopes, below);
        for (int64_t t = 0; t < net->towers && net->normed && i; t++) {
            /* scales and shifts lie behind the weights and biases of the layer below */
            int64_t scale = place - 2 * net->towers * in + t * in;
            denormalise(n, in, below + t * n * in, net->weights + scale, hidden + normal + t * n * in,
                        factors + (i - 1) * rows + t * n, into ? into + scale : NULL,
                        into ? into + scale + net->towers * in : NULL);
        }
        g = below;
    }
}

/* After `forward`: write the gradients of Σ of_out · out by the inputs into of_inputs [n, inputs], where
   of_out [n, outputs] is of what one network alone tells of each row: the first `counts[0]` of
   `rows` are the first network's, and so on. spare: twice [n, widest of the layers before the last]. */
void EXPORT(backward_chosen)(const Layers *net, int64_t n, const float *hidden, const int64_t *rows,
                             const int64_t *counts, const float *of_out, float *spare, float *of_inputs)
{
    int64_t place = 0, widest = 0, slopes = told(net, n), relu = net->activation == RELU && !net->normed;
    int64_t normal = slopes * (1 + (net->activation >= GELU));
    const float *g = of_out, *factors = hidden + normal + slopes;
    for (int64_t i = 0; i < net->layers; place += size_of(net, i), i++)
        if (i < net->layers - 1) {
            hidden += net->towers * n * net->widths[i];
            widest = net->widths[i] > widest ? net->widths[i] : widest;
        }
    for (int64_t i = net->layers - 1; i >= 0; i--) {
        int64_t in = inputs_of(net, i), width = net->widths[i];
        place -= size_of(net, i), hidden -= i ? net->towers * n * in : 0;
        float *below = i ? spare + (i % 2) * n * widest : of_inputs;
        Products all = {.count = net->towers};
        const int64_t *own = rows;
        for (int64_t t = 0; t < net->towers; own += counts[t], t++)
            all.product[t] = (Product){.m = counts[t], .n = in, .k = width, .rows = own, .a = g, .row = width, .step = 1,
                                       .b = net->weights + place + t * in * width, .ldb = width, .turned = 1,
                                       .c = below, .mask = i && relu ? hidden + t * n * in : NULL};
        multiply(&all);
        own = rows;
        for (int64_t t = 0; t < net->towers && i && !relu; own += counts[t], t++)
            for (int64_t r = 0; r < counts[t]; r++) {
                int64_t row = t * n + own[r];
                const float *scale = net->weights + place - 2 * net->towers * in + t * in, *h = hidden + row * in;
                deactivate(in, net->activation, h, h + slopes, below + own[r] * in);
                if (net->normed)
                    denormalise(1, in, below + own[r] * in, scale, h + normal, factors + (i - 1) * net->towers * n + row,
                                NULL, NULL);
            }
        g = below;
    }
}

/* ---- target networks ---- */

/* Move target the way of `rate` to weights. */
void EXPORT(approach)(int64_t n, float rate, const float *restrict weights, float *restrict target)
{
    for (int64_t i = 0; i < n; i++)
        target[i] += rate * (weights[i] - target[i]);
}
