/* An operation of one's own, with its gradient, beside the library's: swish(x) = x sigmoid(beta x).
 *
 *     build/bin/examples/custom_operation
 *
 * The descriptor below is all that a program, its derivative, several ranks and the planner need to know.
 */
#include <math.h>
#include <stdio.h>

#include <tandem/rewrite.h>
#include <tandem/tandem.h>

typedef struct swish_attr { double beta; } swish_attr;                  /* part of the program's fingerprint */

static bool swish_shape(td_call *call)
{
    if (call->in[0]->dtype != TD_F32) return td_call_fail(call, "computes in f32, got %s", td_dtype_name((td_dtype)call->in[0]->dtype));
    call->out[0].shape = call->in[0]->shape;
    call->out[0].dtype = call->in[0]->dtype;
    return true;
}

/* With s = sigmoid(beta x) and y = x s:  dy/dx = s + beta y (1 - s). Recorded, so it has a derivative too. */
static void swish_gradient(const td_gradient_call *g)
{
    const swish_attr *a = g->attr;
    td_context *td = g->td;
    td_tensor beta = td_fill(td, TD_F32, (td_shape){ 0 }, a->beta), one = td_fill(td, TD_F32, (td_shape){ 0 }, 1);
    td_tensor s = td_sigmoid(td_mul(g->in[0], beta));
    td_tensor slope = td_add(s, td_mul(td_mul(beta, g->out[0]), td_sub(one, s)));
    td_gradient_set(g, 0, td_mul(g->dout[0], slope));
}

/* Every dimension may be cut among ranks: dimension i of the input is dimension i of the output. */
static void swish_place(const td_program *p, const td_node *n, td_place_rule *rule)
{
    (void)p, (void)n;
    for (int8_t d = 0; d < TD_MAX_DIMS; d++) rule->in[0][d] = rule->out[0][d] = (int8_t)(d + 1);
}

static void swish_rows(void *user, int64_t begin, int64_t end)
{
    const td_kernel *k = user;
    const float *x = k->in[0].data, beta = (float)((const swish_attr *)k->attr)->beta;
    float *y = k->out[0].data;
    for (int64_t i = begin; i < end; i++) y[i] = x[i] / (1 + expf(-beta * x[i]));
}

static void swish_cpu(const td_kernel *k)
{
    td_parallel_for(k->run, td_shape_elements(k->out[0].shape), 4096, swish_rows, (void *)k);
}

static const td_op swish_op = {
    .name = "swish", .inputs = 1, .attr_bytes = sizeof(swish_attr), .shape = swish_shape, .gradient = swish_gradient, .place = swish_place,
    .cpu = swish_cpu,
};

static td_tensor swish_at(td_tensor x, double beta, td_here here)
{
    return td_record(&swish_op, here, 1, &x, &(swish_attr){ beta });
}
#define swish(x, beta) swish_at((x), (beta), TD_HERE)

int main(void)
{
    td_context *td = td_open(NULL);
    float values[4] = { -2, -0.5f, 0.5f, 2 }, got[4], slope[4];
    td_tensor x = td_input(td, "x", TD_F32, TD_SHAPE(4), values), y = swish(x, 1.5);
    td_tensor dx = td_gradient(y, x);
    td_keep(y);
    td_keep(dx);
    if (!td_step(td) || !td_read(y, got) || !td_read(dx, slope)) fprintf(stderr, "%s\n", td_error_text(td));
    double worst = 0;
    for (int i = 0; i < 4; i++) {
        double s = 1 / (1 + exp(-1.5 * values[i])), expected = s + 1.5 * values[i] * s * (1 - s);
        printf("swish(%4.1f) = %8.5f, slope %8.5f\n", values[i], got[i], slope[i]);
        worst = fmax(worst, fabs(slope[i] - expected));
    }
    bool good = td_error(td) == TD_OK && worst < 1e-6;
    td_close(td);
    return good ? 0 : 1;
}
