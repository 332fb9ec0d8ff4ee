/* The GPT's data: characters of a text, in windows of the context. */
#include <string.h>

#include "models/gpt/gpt.h"

enum { RANDOM_SAMPLES = 4096, RANDOM_VOCABULARY = 65 };

/* Windows with what they stand on. */
typedef struct gpt_windows {
    data_set set;
    data_set *windows;
    data_ids *ids;
    data_tokenizer *tokenizer;
} gpt_windows;

static bool windows_get(const data_set *set, int64_t i, void *const *out, char *error)
{
    const gpt_windows *w = set->self;
    return w->windows->get(w->windows, i, out, error);
}

static void windows_close(data_set *set)
{
    gpt_windows *w = set->self;
    data_set_close(w->windows);
    data_ids_close(w->ids);
    data_tokenizer_close(w->tokenizer);
    td_free(w->set.td, w, sizeof *w, "data");
}

/* With --steps crops do not come again; else an epoch has as many as would cover the text. */
data_set *gpt_text(run_loop *run, const char *split)
{
    td_context *td = run_context(run);
    const char *path = run_data(run);
    gpt_size size;
    bool train = !strcmp(split, "train");
    if (td_error(td) != TD_OK || !gpt_size_of(run, &size)) return NULL;
    gpt_windows *w = td_alloc(td, sizeof *w, "data");
    if (!w) return NULL;
    *w = (gpt_windows){ .tokenizer = data_tokenizer_characters_of(td, path) };
    if (w->tokenizer) w->ids = data_text(td, path, w->tokenizer);
    if (w->ids)
        w->windows = data_windows(td, w->ids, &(data_windows_options){
            .context = size.context, .part = train ? DATA_TRAIN : DATA_VALIDATION, .consecutive = !train, .seed = td_seed(td),
            .count = train && !run_flag_text(run, "steps") ? data_ids_count(w->ids) * 9 / 10 / size.context + 1 : 0 });
    if (w->windows) {
        w->set = *w->windows;
        w->set.self = w;
        w->set.get = windows_get;
        w->set.close = windows_close;
        return &w->set;
    }
    data_ids_close(w->ids);
    data_tokenizer_close(w->tokenizer);
    td_free(td, w, sizeof *w, "data");
    return NULL;
}

data_set *gpt_random(run_loop *run)
{
    gpt_size size;
    if (!gpt_size_of(run, &size)) return NULL;
    int64_t vocabulary = size.vocabulary ? size.vocabulary : RANDOM_VOCABULARY;
    data_column columns[] = {
        { .name = "x", .dtype = TD_I32, .shape = TD_SHAPE(size.context), .classes = vocabulary },
        { .name = "y", .dtype = TD_I32, .shape = TD_SHAPE(size.context), .classes = vocabulary },
    };
    return data_random(run_context(run), columns, 2, RANDOM_SAMPLES, td_seed(run_context(run)));
}
