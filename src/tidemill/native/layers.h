/* Networks of plain layers (layers.c), for the losses that are made of them. */

#pragma once
#include "vectors.h"

#define forward_layers JOIN(tidemill_forward, ISA)
#define backward_layers JOIN(tidemill_backward, ISA)

/* Networks of layers (the last one linear, the activation behind the others), whose weights lie
   one after the other: for each layer [towers, in, out], and biases [towers, out]; of normalised
   ones scales and shifts behind them. */
typedef struct {
    int64_t towers, layers, inputs, activation, normed;
    const int64_t *widths; /* of the layers */
    float *weights;
} Layers;

/* Write out [towers, n, outputs] of x [n, inputs], and what the layers before tell into hidden,
   for each of them [towers, n, width]; behind that, from GELU on, come their slopes, and of
   normalised layers what was normalised, and the factors of the rows, [layers, towers, n]. */
void forward_layers(const Layers *net, const float *x, int64_t n, float *hidden, float *out);

/* After `forward` of the same x: write the gradients of the weights of Σ of_out · out into `into`
   (NULL: not), and of the inputs into of_inputs [towers, n, inputs] (NULL: not). spare: twice
   [towers, n, widest of the layers before the last]. */
void backward_layers(const Layers *net, const float *x, int64_t n, const float *hidden, const float *of_out,
                     float *spare, float *into, float *of_inputs);
