/* Adam and AdamW on CUDA; see adam.c. */
#include "optim/hyper.h"
#include "optim/update.cuh"

/* 1 - beta^updates */
static __device__ double correction(double beta, double updates) { return -expm1(updates * log(beta)); }

template <bool decoupled> struct adam {
    enum { MOMENTS = 2, HYPERS = 4 };
    float grow, couple, shrink, rest1, keep2, rest2, eps, step, inverse;

    __device__ void begin(const double *hyper, double rate, double scale, double updates)
    {
        double decay = hyper[ADAM_DECAY], beta1 = hyper[ADAM_BETA1], beta2 = hyper[ADAM_BETA2];
        grow = (float)scale;
        couple = (float)(decoupled ? 0 : decay);
        shrink = (float)(decoupled ? 1 - rate * decay : 1);
        rest1 = (float)(1 - beta1);
        keep2 = (float)beta2;
        rest2 = (float)(1 - beta2);
        eps = (float)hyper[ADAM_EPS];
        step = (float)(rate / correction(beta1, updates));
        inverse = (float)(1 / sqrt(correction(beta2, updates)));
    }

    __device__ __forceinline__ void apply(float &p, float g, float *m) const
    {
        g = grow * g + couple * p;
        m[0] += rest1 * (g - m[0]);
        m[1] = keep2 * m[1] + rest2 * (g * g);
        p = shrink * p - step * (m[0] / (sqrtf(m[1]) * inverse + eps));
    }
};

extern "C" void opt_adam_cuda(const td_update_range *ranges, int count, const td_update_scalars *scalars)
{
    opt_update<adam<false>>(ranges, count, scalars);
}

extern "C" void opt_adamw_cuda(const td_update_range *ranges, int count, const td_update_scalars *scalars)
{
    opt_update<adam<true>>(ranges, count, scalars);
}
