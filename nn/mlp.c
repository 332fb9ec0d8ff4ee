/* mlp: two linear layers with a function between, or three where the function gates (SwiGLU).
 *
 *     x (..., width)   in, gate (hidden, width)   out (width, hidden)   ->   (..., width)
 */
#include <tandem/nn.h>

nn_mlp nn_mlp_make_at(td_module parent, const char *name, int64_t width, int64_t hidden, const nn_mlp_options *options, td_here here)
{
    static const nn_mlp_options defaults;
    static const char *const standard[] = { "up_proj", "down_proj", "gate_proj" };
    const nn_mlp_options *o = options ? options : &defaults;
    const char *const *names = o->names ? o->names : standard;
    td_module at = td_child(parent, name);
    nn_mlp m = { .at = at, .activation = o->activation, .gated = o->gated };
    if (o->gated) m.gate = nn_linear_make_at(at, names[2], width, hidden, &o->in, here);
    m.in = nn_linear_make_at(at, names[0], width, hidden, &o->in, here);
    m.out = nn_linear_make_at(at, names[1], hidden, width, &o->out, here);
    return m;
}

static td_tensor activate(nn_activation activation, td_tensor x, td_here here)
{
    switch (activation) {
    case NN_GELU:      return td_gelu_at(x, here);
    case NN_GELU_TANH: return td_gelu_tanh_at(x, here);
    case NN_RELU:      return td_relu_at(x, here);
    case NN_SILU:      break;
    }
    return td_silu_at(x, here);
}

/* (..., width) -> (..., hidden) */
static td_tensor gated(const nn_mlp *m, td_tensor x, td_here here)
{
    td_tensor gate = nn_linear_apply_at(&m->gate, x, here);
    td_tensor h = nn_linear_apply_at(&m->in, x, here);
    if (m->activation == NN_SILU) return td_swiglu_at(gate, h, here);
    gate = activate(m->activation, gate, here);
    return td_mul_at(gate, h, here);
}

td_tensor nn_mlp_apply_at(const nn_mlp *m, td_tensor x, td_here here)
{
    td_tensor h;
    td_enter(m->at);
    if (m->gated) {
        h = gated(m, x, here);
    } else {
        h = nn_linear_apply_at(&m->in, x, here);
        h = activate(m->activation, h, here);
    }
    h = nn_linear_apply_at(&m->out, h, here);
    td_leave(m->at);
    return h;
}
