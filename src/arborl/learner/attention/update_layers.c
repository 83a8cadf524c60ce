/* The operations between the matrix products of an update on a CPU, forward and backward, in float32: each in one pass over memory,
   where torch takes several and keeps intermediate results.

   `cpu_kernels.py` compiles it at run time. Threads call a function concurrently and take rows in turn; no sum depends on which thread
   took which rows. */

#include <stdatomic.h>
#include <string.h>

#include "vectors.h"

#define SOME 32     /* rows taken at a time, and summed into one row of `partial` */
#define LEAST -87.0f /* a log-probability below which the probability counts as 0 */

typedef struct {
    int64_t rows, width, heads, stride, back; /* `stride` from one row of x to the next */
    float epsilon;
    const float *x, *y, *weight, *grad, *cos, *sin; /* inputs, weight of a norm, incoming gradient, rotary angles */
    float *out, *more, *each, *partial;             /* outputs of x's size; one number per row; one row per SOME rows */
    /* the head */
    const int64_t *token;
    const float *temperature, *to_logprob, *to_entropy; /* one number per row; the last may be null */
    float *logprob, *entropy;
    atomic_llong next;
} Rows;

int64_t rows_bytes(void) { return sizeof(Rows); }

#define EACH_ROW(r)                                                                                           \
    for (int64_t begin_; (begin_ = SOME * atomic_fetch_add(&s->next, 1)) < s->rows;)                          \
        for (int64_t r = begin_; r < s->rows && r < begin_ + SOME; r++)

ALWAYS vec at(const float *x, int64_t i) { return *(const vec *)(x + i); }
ALWAYS void put(float *x, int64_t i, vec value) { *(vec *)(x + i) = value; }
ALWAYS float one(vec x) { return x[0]; }
ALWAYS vec all(float x) { return (vec){0} + x; }

/* RMS norm: out = x / rms(x) * weight; `each` is 1 / rms(x). */
void norm(Rows *s) {
    const int64_t n = s->width;
    EACH_ROW(r) {
        const float *x = s->x + r * s->stride;
        float *out = s->out + r * n;
        vec sum = {0};
        int64_t i = 0;
        for (; i + W <= n; i += W) sum += at(x, i) * at(x, i);
        float square = across(sum);
        for (; i < n; i++) square += x[i] * x[i];
        const float by = s->each[r] = 1.0f / sqrtf(square / (float)n + s->epsilon);
        for (i = 0; i + W <= n; i += W) put(out, i, at(x, i) * by * at(s->weight, i));
        for (; i < n; i++) out[i] = x[i] * by * s->weight[i];
    }
}

/* out = gradient of x; `partial` holds partial sums of the weight's gradient. */
void norm_backward(Rows *s) {
    const int64_t n = s->width;
    EACH_ROW(r) {
        const float *x = s->x + r * s->stride, *g = s->grad + r * n, *w = s->weight, by = s->each[r];
        float *out = s->out + r * n, *partial = s->partial + r / SOME * n;
        if (r % SOME == 0) memset(partial, 0, n * sizeof(float));
        vec sum = {0};
        int64_t i = 0;
        for (; i + W <= n; i += W) sum += at(x, i) * at(g, i) * at(w, i);
        float along = across(sum);
        for (; i < n; i++) along += x[i] * g[i] * w[i];
        const float back = along / (float)n * by * by;
        for (i = 0; i + W <= n; i += W) {
            put(out, i, by * (at(g, i) * at(w, i) - back * at(x, i)));
            put(partial, i, at(partial, i) + by * at(g, i) * at(x, i));
        }
        for (; i < n; i++) {
            out[i] = by * (g[i] * w[i] - back * x[i]);
            partial[i] += by * g[i] * x[i];
        }
    }
}

/* Rotary position embedding of the two halves of each head, or its gradient with `back`; the sines are signed for the forward pass. */
void rotate(Rows *s) {
    const int64_t size = s->width, half = size / 2;
    EACH_ROW(r) {
        const float *restrict cos = s->cos + r * size, *sin = s->sin + r * size;
        const float *restrict low = s->back ? sin + half : sin, *restrict high = s->back ? sin : sin + half;
        for (int64_t h = 0; h < s->heads; h++) {
            const float *restrict x = s->x + r * s->stride + h * size;
            float *restrict out = s->out + (r * s->heads + h) * size;
            for (int64_t d = 0; d < half; d++) {
                out[d] = x[d] * cos[d] + x[d + half] * low[d];
                out[d + half] = x[d + half] * cos[d + half] + x[d] * high[d];
            }
        }
    }
}

ALWAYS vec logistic(vec x) { return 1.0f / (1.0f + exponential(-x)); }

/* out = silu(x) y. */
void gate(Rows *s) {
    const int64_t n = s->width;
    EACH_ROW(r) {
        const float *x = s->x + r * n, *y = s->y + r * n;
        float *out = s->out + r * n;
        int64_t i = 0;
        for (; i + W <= n; i += W) put(out, i, at(x, i) * logistic(at(x, i)) * at(y, i));
        for (; i < n; i++) out[i] = x[i] * one(logistic(all(x[i]))) * y[i];
    }
}

ALWAYS vec slope(vec x, vec open) { return open * (1.0f + x * (1.0f - open)); }

/* out = gradient of x, more = gradient of y. */
void gate_backward(Rows *s) {
    const int64_t n = s->width;
    EACH_ROW(r) {
        const float *x = s->x + r * n, *y = s->y + r * n, *g = s->grad + r * n;
        float *out = s->out + r * n, *more = s->more + r * n;
        int64_t i = 0;
        for (; i + W <= n; i += W) {
            const vec open = logistic(at(x, i));
            put(out, i, at(g, i) * at(y, i) * slope(at(x, i), open));
            put(more, i, at(g, i) * at(x, i) * open);
        }
        for (; i < n; i++) {
            const vec open = logistic(all(x[i]));
            out[i] = g[i] * y[i] * one(slope(all(x[i]), open));
            more[i] = g[i] * x[i] * one(open);
        }
    }
}

/* For logits x, each row with its own temperature: log-probability of its token, entropy, and in `each` the log-sum-exp. */
void token_logprobs(Rows *s) {
    const int64_t n = s->width;
    EACH_ROW(r) {
        const float *x = s->x + r * n, by = 1.0f / s->temperature[r];
        float top = x[0];
        vec most = all(x[0]), sum = {0}, mean = {0};
        int64_t i = 0;
        for (; i + W <= n; i += W) most = at_least(most, at(x, i));
        for (int j = 0; j < W; j++) top = most[j] > top ? most[j] : top;
        for (; i < n; i++) top = x[i] > top ? x[i] : top;
        for (i = 0; i + W <= n; i += W) {
            const vec over = at_least((at(x, i) - top) * by, all(LEAST)), weight = exponential(over);
            sum += weight;
            mean += weight * over;
        }
        double total = across(sum), moment = across(mean);
        for (; i < n; i++) {
            const float over = fmaxf((x[i] - top) * by, LEAST), weight = expf(over);
            total += weight;
            moment += weight * over;
        }
        const double lse = log(total); /* above the highest logit */
        s->each[r] = (float)(lse + (double)top * by);
        s->logprob[r] = (float)((double)(x[s->token[r]] - top) * by - lse);
        s->entropy[r] = (float)(lse - moment / total);
    }
}

/* out = gradient of the logits. */
void token_logprobs_backward(Rows *s) {
    const int64_t n = s->width;
    EACH_ROW(r) {
        const float *x = s->x + r * n, by = 1.0f / s->temperature[r], lse = s->each[r], entropy = s->entropy[r];
        const float likely = s->to_logprob[r] * by, spread = s->to_entropy ? s->to_entropy[r] * by : 0;
        float *out = s->out + r * n;
        int64_t i = 0;
        for (; i + W <= n; i += W) {
            const vec logprob = at_least(at(x, i) * by - lse, all(LEAST)), p = exponential(logprob);
            put(out, i, -p * (likely + spread * (logprob + entropy)));
        }
        for (; i < n; i++) {
            const float logprob = fmaxf(x[i] * by - lse, LEAST);
            out[i] = -expf(logprob) * (likely + spread * (logprob + entropy));
        }
        out[s->token[r]] += likely;
    }
}
