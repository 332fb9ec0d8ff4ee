/* A small model of characters learns a sentence and writes it from its beginning: a training loop, then decoding with a cache, where each
 * character costs one row.
 *
 *     build/bin/examples/sampling
 */
#include <stdio.h>
#include <string.h>
#include <tandem/tandem.h>

enum { LETTERS = 128, WIDTH = 32, HEADS = 2, CONTEXT = 48, STEPS = 150 };

static const char SENTENCE[CONTEXT + 1] = "She sells sea shells by the sea shore, I'm sure.";

typedef struct { nn_embedding letters, places; nn_block block; nn_linear head; } model;

/* ids (1, T) at places (1, T) -> (1, T, LETTERS); sequence: NULL, or the cache and where its new rows begin */
static td_tensor forward(const model *m, td_tensor ids, td_tensor places, const nn_sequence *sequence)
{
    td_tensor x = nn_embedding_apply(&m->letters, ids);
    td_tensor place = nn_embedding_apply(&m->places, places);
    x = nn_block_apply_to(&m->block, td_add(x, place), sequence);
    return nn_linear_apply(&m->head, x);
}

/* The letter that most likely comes after `id` at `position`. */
static int32_t next(const model *m, td_context *td, nn_cache *cache, int32_t id, int32_t position)
{
    td_tensor at = td_input(td, "position", TD_I32, TD_SHAPE(1), &position);
    td_tensor ids = td_input(td, "id", TD_I32, TD_SHAPE(1, 1), &id);
    td_tensor logits = forward(m, ids, td_reshape(at, 1, 1), &(nn_sequence){ .positions = at, .cache = cache });
    td_tensor best = td_argmax(logits);           /* of td_softmax(logits), one draws */
    td_keep(best);
    td_step(td);
    return (int32_t)td_item(best);
}

int main(void)
{
    td_context *td = td_open(NULL);
    td_module root = td_root(td);
    model m = { nn_embedding_make(root, "letters", LETTERS, WIDTH), nn_embedding_make(root, "places", CONTEXT, WIDTH),
                nn_block_make(root, "block", WIDTH, HEADS, 4 * WIDTH), nn_linear_make(root, "head", WIDTH, LETTERS) };
    opt_optimizer *opt = opt_adamw(root, NULL);
    int32_t ids[CONTEXT], places[CONTEXT];
    for (int i = 0; i < CONTEXT; i++) {
        ids[i] = SENTENCE[i];
        places[i] = i;
    }

    for (int step = 0; step < STEPS; step++) {                      /* each letter says which one follows */
        td_tensor x = td_input(td, "x", TD_I32, TD_SHAPE(1, CONTEXT - 1), ids);
        td_tensor y = td_input(td, "y", TD_I32, TD_SHAPE(1, CONTEXT - 1), ids + 1);
        td_tensor at = td_input(td, "at", TD_I32, TD_SHAPE(1, CONTEXT - 1), places);
        td_backward(td_cross_entropy(forward(&m, x, at, NULL), y));
        opt_step(opt, 0.01);
        if (!td_step(td)) break;
    }

    td_set_mode(td, TD_EVAL);
    nn_cache cache = nn_cache_make(&m.block.attention, "cache", 1, CONTEXT);
    char text[CONTEXT + 1] = "She sells";
    int32_t prompt = (int32_t)strlen(text);
    for (int32_t i = 0; i + 1 < CONTEXT; i++) {                     /* the prompt is read as what is written: a row at a time */
        int32_t id = next(&m, td, &cache, text[i], i);
        if (i + 1 >= prompt) text[i + 1] = (char)id;
    }
    printf("%s\n%s", text, td_error(td) == TD_OK ? "" : td_error_text(td));
    opt_close(opt);
    td_close(td);
    return strcmp(text, SENTENCE) != 0;
}
