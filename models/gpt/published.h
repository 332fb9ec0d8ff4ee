/* How a GPT is published: a folder with config.json, model.safetensors (or shards and their index) and a tokenizer's files, as Hugging
 * Face's transformers write and read it. Its keys are the parameters' names, GPT-2's behind "transformer." or not. */
#ifndef TANDEM_MODELS_GPT_PUBLISHED_H
#define TANDEM_MODELS_GPT_PUBLISHED_H

#include "models/gpt/gpt.h"

enum { GPT_PATH = 4096 };

/* path = dir/name; false and an error: too long. */
bool gpt_path(td_context *td, char path[GPT_PATH], const char *dir, const char *name);

/* Gives the flags of form and sizes the values that a config.json has. Errors name the file, the key, and what is not understood. */
bool gpt_config_read(run_loop *run, const char *path);
/* dtype: of the weights. */
bool gpt_config_write(run_loop *run, const gpt_size *size, td_dtype dtype, const char *path);

/* GPT-2's products are published as (in, out), and are (out, in) here. */
bool gpt_is_turned(gpt_form form, const char *name, td_shape shape);
/* to (columns, rows) = from (rows, columns), elements of `size` bytes: 2, 4 or 8. */
void gpt_turn(void *to, const void *from, int64_t rows, int64_t columns, int64_t size);

/* With --json: what a command came to as an object on stdout; dtype: of the weights written. */
void gpt_report(run_loop *run, const char *command, td_dtype dtype);

/* Copies a folder's tokenizer.json, or its vocab.json and merges.txt, if it has any, to `dir`, which is made for them. */
bool gpt_copy_tokenizer(td_context *td, const char *from, const char *dir); /* tokens.c */
/* The run in --out keeps one. */
bool gpt_has_tokenizer(run_loop *run);                                       /* tokens.c */

#endif
