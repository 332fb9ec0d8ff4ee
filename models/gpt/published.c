/* What reading and writing published files share. */
#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "core/json.h"
#include "models/gpt/published.h"

bool gpt_is_turned(gpt_form form, const char *name, td_shape shape) { return form == GPT_2 && shape.rank == 2 && !strncmp(name, "h.", 2); }

/* Tiles keep the lines of both sides in the cache. */
#define TURN(T)                                                                                                                \
    for (int64_t top = 0; top < rows; top += TILE)                                                                             \
        for (int64_t left = 0; left < columns; left += TILE)                                                                   \
            for (int64_t r = top; r < rows && r < top + TILE; r++)                                                             \
                for (int64_t c = left; c < columns && c < left + TILE; c++) ((T *)to)[c * rows + r] = ((const T *)from)[r * columns + c]

void gpt_turn(void *to, const void *from, int64_t rows, int64_t columns, int64_t size)
{
    enum { TILE = 32 };
    if (size == 2) TURN(uint16_t);
    if (size == 4) TURN(uint32_t);
    if (size == 8) TURN(uint64_t);
}

bool gpt_path(td_context *td, char path[GPT_PATH], const char *dir, const char *name)
{
    if (snprintf(path, GPT_PATH, "%s/%s", dir, name) < GPT_PATH) return true;
    td_fail(td, TD_ERROR_DATA, "%.200s...: too long a path", dir);
    return false;
}

void gpt_report(run_loop *run, const char *command, td_dtype dtype)
{
    td_context *td = run_context(run);
    if (!run_flag_on(run, "json")) return;
    td_json_writer w = td_json_begin(td);
    td_json_open_object(&w, NULL);
    td_json_put_string(&w, "model", "gpt");
    td_json_put_string(&w, "command", command);
    td_json_put_string(&w, "dtype", td_dtype_name(dtype));
    td_json_put_integer(&w, "params", td_parameter_elements(td));
    td_json_close_object(&w);
    const char *text = td_json_text(&w);
    if (text && (printf("%s\n", text) < 0 || fflush(stdout))) td_fail(td, TD_ERROR_DATA, "cannot write to stdout: %s", strerror(errno));
    td_json_end(&w);
}
