/* Adagrad with a sum for each element, on CUDA; see adagrad.c. */
#include "optim/hyper.h"
#include "optim/update.cuh"

struct adagrad {
    enum { MOMENTS = 1, HYPERS = 3 };
    float grow, decay, eps, rate;

    __device__ void begin(const double *hyper, double rate_now, double scale, double updates)
    {
        grow = (float)scale;
        decay = (float)hyper[ADAGRAD_DECAY];
        eps = (float)hyper[ADAGRAD_EPS];
        rate = (float)(rate_now / (1 + (updates - 1) * hyper[ADAGRAD_RATE_DECAY]));
    }

    __device__ __forceinline__ void apply(float &p, float g, float *m) const
    {
        float d = grow * g + decay * p;
        m[0] += d * d;
        p -= rate * d / (sqrtf(m[0]) + eps);
    }
};

extern "C" void opt_adagrad_cuda(const td_update_range *ranges, int count, const td_update_scalars *scalars)
{
    opt_update<adagrad>(ranges, count, scalars);
}
