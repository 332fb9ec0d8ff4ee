/* Weights as decoding in bf16 reads them: a product rounds its weights to bf16, and where nothing trains they are the same at every token.
 * So they are rounded once, to copies that take half the memory, and memory is what a token waits for. Logits stay the same to the bit.
 */
#include <stdlib.h>
#include <string.h>

#include "models/gpt/gpt.h"

enum { PART = 1 << 16 };         /* elements at a time */

typedef struct narrowing {
    td_context *td;
    float *wide;                 /* PART */
    uint16_t *narrow;
} narrowing;

static bool copy_elements(const narrowing *n, td_state from, td_state to)
{
    int64_t count = td_shape_elements(td_state_shape(from));
    for (int64_t begin = 0; begin < count; begin += PART) {
        int64_t part = count - begin < PART ? count - begin : PART;
        if (!td_state_read(from, begin, part, n->wide)) return false;
        td_convert(TD_BF16, n->narrow, TD_F32, n->wide, part);
        if (!td_state_write(to, begin, part, n->narrow)) return false;
    }
    return true;
}

/* The layer reads a copy of `weight` from now on. */
static bool narrow_layer(const narrowing *n, nn_linear *l, td_state weight)
{
    td_state copy = td_buffer(l->at, "weight_bf16", TD_BF16, td_state_shape(weight), td_init_constant(0));
    l->weight = copy;
    return td_error(n->td) == TD_OK && copy_elements(n, weight, copy);
}

static bool narrow_block(const narrowing *n, nn_block *b)
{
    nn_linear *const layers[] = { &b->attention.qkv, &b->attention.q, &b->attention.k, &b->attention.v, &b->attention.out,
                                  &b->mlp.in, &b->mlp.gate, &b->mlp.out };
    for (size_t i = 0; i < sizeof layers / sizeof *layers; i++) /* those that the form has */
        if (layers[i]->weight.td && !narrow_layer(n, layers[i], layers[i]->weight)) return false;
    return true;
}

static bool narrow_head(const narrowing *n, gpt *g)
{
    if (g->size.untied) return narrow_layer(n, &g->head, g->head.weight);
    g->head = (nn_linear){ .at = g->tokens.at };
    g->size.untied = true;
    return narrow_layer(n, &g->head, g->tokens.weight);
}

bool gpt_narrow(gpt *g)
{
    td_context *td = g->tokens.weight.td;
    narrowing n = { td, malloc(PART * sizeof *n.wide), malloc(PART * sizeof *n.narrow) };
    bool ok = n.wide && n.narrow;
    if (!ok) td_fail(td, TD_ERROR_MEMORY, "out of memory for weights in bf16");
    for (int64_t l = 0; ok && l < g->size.layers; l++) ok = narrow_block(&n, &g->block[l]);
    ok = ok && narrow_head(&n, g);
    free(n.wide);
    free(n.narrow);
    return ok;
}
