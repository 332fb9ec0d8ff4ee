/* The GPT's data: tokens of a text, in windows of the context. */
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

static bool is_token_file(const char *path)
{
    size_t length = strlen(path);
    return length > 4 && !strcmp(path + length - 4, ".bin");
}

/* The ids of --data; a file of them has two bytes an id where the vocabulary allows. */
static data_ids *open_ids(run_loop *run, data_tokenizer *tokenizer)
{
    td_context *td = run_context(run);
    const char *path = run_data(run);
    int64_t vocabulary = data_tokenizer_vocabulary(tokenizer);
    if (!is_token_file(path)) return data_text(td, path, tokenizer);
    return data_tokens(td, path, &(data_tokens_options){ .bits = vocabulary > 1 << 16 ? 32 : 16, .vocabulary = vocabulary });
}

/* A file of tokens says nothing of the characters they are. */
static bool check_tokens(run_loop *run)
{
    if (run_restores(run) || !is_token_file(run_data(run)) || strcmp(run_flag_text(run, "tokenizer"), "characters")) return true;
    td_fail(run_context(run), TD_ERROR_USAGE, "%.400s is a file of tokens: --tokenizer must name the tokenizer that made them", run_data(run));
    return false;
}

/* With --steps crops do not come again; else an epoch has as many as would cover the text. */
data_set *gpt_text(run_loop *run, const char *split)
{
    td_context *td = run_context(run);
    gpt_size size;
    bool train = !strcmp(split, "train");
    if (td_error(td) != TD_OK || !*run_data(run) || !gpt_size_of(run, &size) || !check_tokens(run)) return NULL;
    gpt_windows *w = td_alloc(td, sizeof *w, "data");
    if (!w) return NULL;
    *w = (gpt_windows){ .tokenizer = gpt_tokenizer(run) };
    if (w->tokenizer && gpt_vocabulary(run, data_tokenizer_vocabulary(w->tokenizer)) >= 0) w->ids = open_ids(run, w->tokenizer);
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
    int64_t batch = run_flag_whole(run, "batch"), samples = batch > RANDOM_SAMPLES ? batch : RANDOM_SAMPLES;
    return data_random(run_context(run), columns, 2, samples, td_seed(run_context(run)));
}
