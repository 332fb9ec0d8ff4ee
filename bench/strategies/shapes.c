/* Models by name: shapes in which other frameworks' rates on several GPUs are known, under the strategies and with the rows a rank of those
 * figures. bench/compare has the same shapes for PyTorch.
 */
#include <string.h>

#include "bench/strategies/strategies.h"

static const shape shapes[] = {
    { "gpt2-124m", "gpt", { "--size", "124m" }, "ddp", .rows = 32, .tokens = 1024 },
    { "gpt-10m", "gpt", { "--size", "10m", "--vocabulary", "65", "--dropout", "0" }, "ddp", .rows = 64, .tokens = 256 },
    { "llama1b", "gpt", { "--size", "llama1b" }, "fsdp", .rows = 4, .tokens = 2048 },
    { "llama8b", "gpt", { "--size", "llama8b", "--context", "4096" }, "fsdp", .rows = 2, .tokens = 4096 },
    { "gpt2-1558m", "gpt", { "--size", "1558m" }, "ddp,zero1,zero2,fsdp", .rows = 8, .tokens = 1024 },
};
enum { SHAPES = sizeof shapes / sizeof *shapes };

const shape *shape_named(const char *name)
{
    for (int i = 0; i < SHAPES; i++)
        if (!strcmp(shapes[i].name, name)) return &shapes[i];
    return NULL;
}

const char *shape_names(char to[SHAPE_NAMES])
{
    size_t at = 0;
    for (int i = 0; i < SHAPES; i++) at += (size_t)snprintf(to + at, SHAPE_NAMES - at, "%s%s", i ? "," : "", shapes[i].name);
    return to;
}
