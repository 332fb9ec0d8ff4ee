/* Memory of the host that inputs are given from: pinned where there is a GPU, which then reads a step's inputs from where they lie. */
#include "core/internal.h"

static bool holds(const td_span *s, const void *from, int64_t bytes)
{
    return (uintptr_t)from >= s->begin && (uintptr_t)from + (uintptr_t)bytes <= s->end;
}

bool td_is_input_memory(const td_context *td, const void *from, int64_t bytes)
{
    bool is = false;
    for (uint32_t i = 0; i < td->input_count && !is; i++) is = holds(&td->inputs[i], from, bytes);
    return is;
}

void *td_input_memory(td_context *td, int64_t bytes)
{
    if (!td->cuda) return td_alloc(td, (size_t)bytes, "data");
    if (!td_grow(td, (void **)&td->inputs, &td->input_room, td->input_count + 1, sizeof *td->inputs, "data")) return NULL;
    void *memory = td->host->get(td, bytes, "data");
    if (memory) td->inputs[td->input_count++] = (td_span){ (uintptr_t)memory, (uintptr_t)memory + (uintptr_t)bytes };
    return memory;
}

bool td_input_wait(td_context *td, const void *memory, int64_t bytes)
{
    td_span span = { (uintptr_t)memory, (uintptr_t)memory + (uintptr_t)bytes };
    return !td->cuda || td->device->inputs_read(td, span);
}

void td_input_memory_free(td_context *td, void *memory, int64_t bytes)
{
    if (!memory) return;
    if (!td->cuda) {
        td_free(td, memory, (size_t)bytes, "data");
        return;
    }
    td_input_wait(td, memory, bytes);
    uint32_t i = 0;
    while (i < td->input_count && td->inputs[i].begin != (uintptr_t)memory) i++;
    if (i == td->input_count) return;
    td->inputs[i] = td->inputs[--td->input_count];
    td->host->put(td, memory, bytes, "data");
}
