/* Making the attribute of a fused chain: values are numbered as they come, then share registers. */
#include "core/ops/fused.h"

#include <string.h>

int td_fused_input(td_fused_builder *b)
{
    return b->inputs < TD_FUSED_INPUTS ? b->inputs++ : -1;
}

int td_fused_apply(td_fused_builder *b, const td_op *op, td_dtype dtype, const int *from)
{
    if (b->instructions == TD_FUSED_INSTRUCTIONS)
        return -1;
    td_fused_instruction *i = &b->code[b->instructions];
    *i = (td_fused_instruction){ .function = (uint16_t)op->pointwise,
                                 .to = (uint16_t)(TD_FUSED_INPUTS + b->instructions),
                                 .dtype = (uint16_t)dtype };
    for (int s = 0; s < 3; s++) /* an operand a function does not have is its first, so that it names a register */
        i->from[s] = (uint16_t)from[s < td_pointwise_inputs[op->pointwise] ? s : 0];
    return TD_FUSED_INPUTS + b->instructions++;
}

int td_fused_mask(td_fused_builder *b, td_dtype dtype, td_fused_draw draw)
{
    if (b->instructions == TD_FUSED_INSTRUCTIONS || b->draws == TD_FUSED_DRAWS)
        return -1;
    b->draw[b->draws] = draw;
    b->code[b->instructions] = (td_fused_instruction){ .function = TD_POINTWISE_dropout_mask,
                                                       .to = (uint16_t)(TD_FUSED_INPUTS + b->instructions),
                                                       .from = { (uint16_t)b->draws++ },
                                                       .dtype = (uint16_t)dtype };
    return TD_FUSED_INPUTS + b->instructions++;
}

bool td_fused_output(td_fused_builder *b, int value)
{
    if (b->outputs == TD_FUSED_OUTPUTS)
        return false;
    b->output[b->outputs++] = (uint16_t)value;
    return true;
}

bool td_fused_reduce(td_fused_builder *b, td_fused_reduction reduction, int value)
{
    if (!td_fused_output(b, value))
        return false;
    b->rows.reduction[b->reduced++] = (uint8_t)reduction;
    return true;
}

/* How many of `from` are values. */
static int operands_of(const td_fused_instruction *i)
{
    return i->function == TD_POINTWISE_dropout_mask ? 0 : 3;
}

/* The last instruction that reads each value; outputs are read after all. */
static void last_reads(const td_fused_builder *b, int last[TD_FUSED_INPUTS + TD_FUSED_INSTRUCTIONS])
{
    for (int v = 0; v < TD_FUSED_INPUTS + TD_FUSED_INSTRUCTIONS; v++)
        last[v] = -1;
    for (int i = 0; i < b->instructions; i++)
        for (int s = 0; s < operands_of(&b->code[i]); s++)
            last[b->code[i].from[s]] = i;
    for (int o = 0; o < b->outputs; o++)
        last[b->output[o]] = b->instructions;
}

static size_t draws_at(const td_fused_header *h)
{
    size_t bytes = sizeof *h + (size_t)h->instructions * sizeof(td_fused_instruction) + (size_t)h->outputs * sizeof(uint16_t);
    return (bytes + 7) & ~(size_t)7;
}

static size_t rows_at(const td_fused_header *h)
{
    return draws_at(h) + (size_t)h->draws * sizeof(td_fused_draw);
}

/* Field by field: what is between them stays zero. */
static void write_rows(td_fused_rows *to, const td_fused_builder *b)
{
    to->shape = b->rows.shape;
    to->place = b->rows.place;
    to->dims = b->rows.dims;
    memcpy(to->reduction, b->rows.reduction, (size_t)b->reduced);
}

size_t td_fused_finish(const td_fused_builder *b, void *attr)
{
    enum { VALUES = TD_FUSED_INPUTS + TD_FUSED_INSTRUCTIONS };
    int last[VALUES];
    uint16_t home[VALUES] = { 0 }; /* the register of each value */
    bool taken[TD_FUSED_REGISTERS] = { false };
    td_fused_instruction code[TD_FUSED_INSTRUCTIONS];
    td_fused_header header = {
        .inputs = b->inputs, .outputs = b->outputs, .instructions = b->instructions, .registers = b->inputs, .draws = b->draws,
        .reduced = b->reduced
    };
    last_reads(b, last);
    for (int v = 0; v < b->inputs; v++) {
        home[v] = (uint16_t)v;
        taken[v] = true;
    }
    for (int i = 0; i < b->instructions; i++) {
        code[i] = b->code[i];
        for (int s = 0; s < operands_of(&code[i]); s++) {
            int value = b->code[i].from[s];
            code[i].from[s] = home[value];
            if (last[value] == i && value >= TD_FUSED_INPUTS)
                taken[home[value]] = false; /* the result may take its place */
        }
        int free = b->inputs;
        while (free < TD_FUSED_REGISTERS && taken[free])
            free++;
        if (free == TD_FUSED_REGISTERS)
            return 0;
        taken[free] = last[TD_FUSED_INPUTS + i] >= 0;
        home[TD_FUSED_INPUTS + i] = code[i].to = (uint16_t)free;
        header.registers = free >= header.registers ? free + 1 : header.registers;
    }
    uint16_t output[TD_FUSED_OUTPUTS];
    for (int o = 0; o < b->outputs; o++)
        output[o] = home[b->output[o]];
    size_t code_bytes = (size_t)b->instructions * sizeof *code, output_bytes = (size_t)b->outputs * sizeof *output;
    size_t draws = draws_at(&header), draw_bytes = (size_t)b->draws * sizeof *b->draw, rows = rows_at(&header);
    size_t bytes = rows + (b->reduced ? sizeof b->rows : 0);
    memset(attr, 0, bytes);
    memcpy(attr, &header, sizeof header);
    memcpy((char *)attr + sizeof header, code, code_bytes);
    memcpy((char *)attr + sizeof header + code_bytes, output, output_bytes);
    memcpy((char *)attr + draws, b->draw, draw_bytes);
    if (b->reduced)
        write_rows((td_fused_rows *)((char *)attr + rows), b);
    return bytes;
}

td_fused_code td_fused_code_of(const void *attr)
{
    td_fused_code c = { .header = *(const td_fused_header *)attr };
    c.instructions = (const void *)((const char *)attr + sizeof c.header);
    c.outputs = (const void *)(c.instructions + c.header.instructions);
    c.draws = (const void *)((const char *)attr + draws_at(&c.header));
    c.rows = c.header.reduced ? (const void *)((const char *)attr + rows_at(&c.header)) : NULL;
    return c;
}

td_arg td_fused_whole(const td_kernel *k, const td_fused_rows *rows)
{
    td_arg whole = k->out[0];
    whole.data = NULL;
    if (!rows)
        return whole;
    whole.shape = whole.global = rows->shape;
    whole.place = rows->place;
    if (k->run && k->run->mesh)
        whole.shape = td_local_shape(k->run->mesh, rows->shape, rows->place);
    return whole;
}

int64_t td_fused_row_elements(const td_arg *whole, const td_fused_rows *rows)
{
    return td_shape_product(whole->shape, (int)whole->shape.rank - rows->dims, (int)whole->shape.rank);
}
