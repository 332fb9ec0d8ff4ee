/* Lion on CUDA; see lion.c. */
#include "optim/hyper.h"
#include "optim/update.cuh"

struct lion {
    enum { MOMENTS = 1, HYPERS = 3 };
    float grow, rate, decay, beta1, beta2;

    __device__ void begin(const double *hyper, double rate_now, double scale, double)
    {
        grow = (float)scale;
        rate = (float)rate_now;
        decay = (float)hyper[LION_DECAY];
        beta1 = (float)hyper[LION_BETA1];
        beta2 = (float)hyper[LION_BETA2];
    }

    __device__ __forceinline__ void apply(float &p, float g, float *m) const
    {
        float d = grow * g, c = beta1 * m[0] + (1 - beta1) * d;
        float direction = (float)((c > 0) - (c < 0));
        p -= rate * (direction + decay * p);
        m[0] = beta2 * m[0] + (1 - beta2) * d;
    }
};

extern "C" void opt_lion_cuda(const td_update_range *ranges, int count, const td_update_scalars *scalars)
{
    opt_update<lion>(ranges, count, scalars);
}
