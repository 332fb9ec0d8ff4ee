/* Schedules of the learning rate (formulas in optim.h). */
#include <tandem/optim.h>

#include <math.h>

/* How far between the end of the warm-up and the end: 0 to 1. */
static double progress(const opt_schedule *s, int64_t step)
{
    if (step >= s->steps) return 1;
    return (double)(step - s->warmup) / (double)(s->steps - s->warmup);
}

double opt_rate(const opt_schedule *s, int64_t step)
{
    if (step < s->warmup) return s->rate * (double)(step + 1) / (double)(s->warmup + 1);
    double range = s->rate - s->final_rate;
    switch (s->kind) {
    case OPT_CONSTANT:   return s->rate;
    case OPT_LINEAR:     return s->rate - range * progress(s, step);
    case OPT_COSINE:     return s->final_rate + range * (1 + cos(M_PI * progress(s, step))) / 2;
    case OPT_POLYNOMIAL: return s->final_rate + range * pow(1 - progress(s, step), s->power);
    case OPT_STEP:       return s->every > 0 ? s->rate * pow(s->factor, (double)(step / s->every)) : s->rate;
    }
    return s->rate;
}
