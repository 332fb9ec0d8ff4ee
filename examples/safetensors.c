/* Reading a safetensors file: what is in it, and a tensor of it as an input. The file is made here first.
 *
 *     build/bin/examples/safetensors
 */
#include <stdio.h>
#include <string.h>
#include <tandem/tandem.h>

int main(void)
{
    td_context *td = td_open(NULL);
    static const char path[] = "example.safetensors";
    float weight[6] = { 1, 2, 3, 4, 5, 6 }, bias[2] = { 0.5f, -0.5f }, values[6];
    td_safetensors_entry made[] = {
        { .name = "out.weight", .dtype = TD_F32, .shape = TD_SHAPE(2, 3), .data = weight, .bytes = sizeof weight },
        { .name = "out.bias", .dtype = TD_F32, .shape = TD_SHAPE(2), .data = bias, .bytes = sizeof bias },
    };
    td_safetensors_write(td, path, made, 2, (const char *const[]){ "format", "pt", NULL });

    td_safetensors *file = td_safetensors_open(td, path);
    for (int64_t i = 0; file && i < td_safetensors_count(file); i++) {
        td_safetensors_entry e = td_safetensors_at(file, i);
        printf("%-12s %s, %lld bytes\n", e.name, td_dtype_name(e.dtype), (long long)e.bytes);
    }
    td_safetensors_entry e;
    double sum = 0;
    if (file && td_safetensors_find(file, "out.weight", &e)) {
        memcpy(values, e.data, sizeof values);                          /* the file may hold it at any alignment */
        sum = td_item(td_sum(td_input(td, e.name, e.dtype, e.shape, values), TD_ALL, TD_DROP));
        printf("its sum      %g\n", sum);
    }
    if (file) td_safetensors_close(file);
    remove(path);
    if (td_error(td) != TD_OK) fprintf(stderr, "%s\n", td_error_text(td));
    td_close(td);
    return sum == 21 ? 0 : 1;
}
