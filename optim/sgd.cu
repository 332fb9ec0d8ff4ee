/* Stochastic gradient descent on CUDA, with momentum or without; see sgd.c. */
#include "optim/hyper.h"
#include "optim/rows.cuh"

struct plain {
    enum { MOMENTS = 0, HYPERS = 1 };
    float grow, rate, decay;

    __device__ void begin(const double *hyper, double rate_now, double scale, double)
    {
        grow = (float)scale;
        rate = (float)rate_now;
        decay = (float)hyper[SGD_DECAY];
    }

    __device__ __forceinline__ void apply(float &p, float g, float *) const { p -= rate * (grow * g + decay * p); }
};

struct with_momentum {
    enum { MOMENTS = 1, HYPERS = 4 };
    float grow, rate, decay, momentum, enters, direct, through;

    __device__ void begin(const double *hyper, double rate_now, double scale, double updates)
    {
        bool nesterov = hyper[SGD_NESTEROV] != 0;
        grow = (float)scale;
        rate = (float)rate_now;
        decay = (float)hyper[SGD_DECAY];
        momentum = (float)hyper[SGD_MOMENTUM];
        enters = (float)(updates > 1 ? 1 - hyper[SGD_DAMPENING] : 1);
        direct = nesterov;
        through = nesterov ? momentum : 1;
    }

    __device__ __forceinline__ void apply(float &p, float g, float *m) const
    {
        float d = grow * g + decay * p;
        m[0] = momentum * m[0] + enters * d;
        p -= rate * (direct * d + through * m[0]);
    }
};

extern "C" void opt_sgd_cuda(const td_update_range *ranges, int count, const td_update_scalars *scalars)
{
    opt_update<plain>(ranges, count, scalars);
}

extern "C" void opt_sgd_cuda_rows(const td_update_range *range, const int32_t *ids, const td_update_scalars *scalars)
{
    opt_update_rows<plain>(range, ids, scalars);
}

extern "C" void opt_momentum_cuda(const td_update_range *ranges, int count, const td_update_scalars *scalars)
{
    opt_update<with_momentum>(ranges, count, scalars);
}
