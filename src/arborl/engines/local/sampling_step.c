/* One sampling step of Llama and related models on a CPU, in float32: new tokens in, sampled tokens out.

   Plain C with the vector extensions of GCC and Clang, for any processor; `cpu_runner.py` compiles it on the machine. Weights are packed
   in panels of PANEL outputs (`pack`), so a product reads them sequentially. Keys are stored with the tokens side by side and values with
   the components side by side, so scores and weighted sums of values are products of the same form as those with weights, over the cache
   blocks in place. The numbers of a token do not depend on the other tokens of the step, nor on the number of threads or their mode.

   Threads call `run` at the same time, in one of two modes:
   - By tokens: each thread computes some of the tokens, through all layers. Threads wait for each other only if tokens of one sequence
     are in two parts: once per layer, because keys must be stored before they are read.
   - By columns: the threads share the output columns of each product, and wait for each other after every operation. The weights are
     read once per step instead of once per thread, which decides the speed of a step with few tokens and weights larger than the caches. */

#include <math.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <string.h>

#include "vectors.h"

#define QUERIES 8 /* queries of one sequence and key head that attention computes together */
#define BLOCK 48  /* tokens that a thread computes together, so that their activations stay in the cache */
#define RUN (16 * W) /* probabilities that are summed before the search for the sampled token looks at single ones */
#if defined(__x86_64__) || defined(__i386__)
#define spin_hint() __builtin_ia32_pause()
#define SPINS 20000
#elif defined(__aarch64__)
#define spin_hint() __asm__ __volatile__("isb")
#define SPINS 20000
#else
#define spin_hint()
#define SPINS 100000
#endif
#define UNITS 4 /* parts per thread that a product is divided into, so that a delayed thread computes fewer */

typedef struct {
    const float *qkv, *qkv_bias, *q_norm, *k_norm, *out, *out_bias, *gate_up, *gate_up_bias, *down, *down_bias;
    const float *before, *between; /* weights of the norms before attention and before the feed-forward network */
} Layer;

typedef struct {
    /* the model */
    int64_t layers, width, inner, heads, key_heads, size, vocabulary;
    float epsilon, scale;
    const Layer *layer;
    const float *embedding, *last, *head, *head_bias, *cos, *sin;
    /* the cache: keys [layers, pages, key heads, size, room], values [layers, pages, key heads, room, padded size] */
    float *keys, *values;
    int64_t pages, page, room, padded;
    /* the step: id, position and row of each token; pages (cache blocks) of each row */
    int64_t tokens, table_width, sampled;
    const int32_t *token, *position, *row, *table;
    float *x, *q; /* [tokens, width], [tokens, heads * size] */
    /* sampled tokens, in the order of the tokens that they follow */
    const int64_t *after;
    const double *temperature, *uniform;
    float *const *logits; /* where the logits of each are written, or null; null if none are wanted */
    const uint8_t *const *allowed; /* the tokens that a schema allows for each (bits), or null; null if no logits are edited */
    const int64_t *penalties, *penalized; /* those of the i-th are penalties[i] to penalties[i + 1] */
    const float *penalty;
    int64_t *drawn;
    double *logprob;
    /* threads */
    int64_t parts, columns; /* number of threads; whether they share the columns of products */
    int64_t apart; /* by tokens: whether no sequence is in two parts */
    const int64_t *bounds; /* by tokens: part i has the tokens from bounds[i] to bounds[i + 1] */
    float *scratch, *shared; /* of each thread; of all threads in the mode by columns */
    int64_t scratch_each;
    atomic_int arrived, round, next; /* next: the first unit of the present operation that no thread has taken */
} Step;

int64_t panel(void) { return PANEL; }
int64_t lanes(void) { return W; }
int64_t step_bytes(void) { return sizeof(Step); }

/* ---------------------------------------------------------------------------------------------------------------- products */

/* Rows per tile, so that all tiles have about the same height. */
static int64_t tile_rows(int64_t rows) { return rows ? up(rows, up(rows, ROWS) / ROWS) / (up(rows, ROWS) / ROWS) : 1; }

/* c[rows][outs] = a[rows][depth] times packed weights; with `add`, added to c. */
static void product(const float *a, int64_t lda, const float *packed, const float *bias, float *c, int64_t ldc, int64_t rows, int64_t depth,
                    int64_t outs, int add) {
    const int64_t high = tile_rows(rows);
    for (int64_t o = 0; o < outs; o += PANEL) {
        const float *b = packed + o * depth;
        const int64_t here = outs - o < PANEL ? outs - o : PANEL;
        for (int64_t r = 0; r < rows; r += high) {
            const int m = (int)(rows - r < high ? rows - r : high);
            float *to = c + r * ldc + o;
            if (here == PANEL) {
                (add ? add2 : set2)(m, a + r * lda, lda, b, PANEL, to, ldc, depth, PANEL * depth);
            } else {
                float edge[ROWS * PANEL];
                set2(m, a + r * lda, lda, b, PANEL, edge, PANEL, depth, 0);
                for (int i = 0; i < m; i++)
                    for (int64_t j = 0; j < here; j++) to[i * ldc + j] = edge[i * PANEL + j] + (add ? to[i * ldc + j] : 0);
            }
            if (bias)
                for (int i = 0; i < m; i++)
                    for (int64_t j = 0; j < here; j++) to[i * ldc + j] += bias[o + j];
        }
    }
}

/* weight[outs][depth] in panels of PANEL outputs; the last panel is padded with zeros. */
void pack(const float *weight, float *packed, int64_t outs, int64_t depth) {
    for (int64_t o = 0; o < outs; o += PANEL)
        for (int64_t d = 0; d < depth; d++)
            for (int64_t j = 0; j < PANEL; j++) packed[o * depth + d * PANEL + j] = o + j < outs ? weight[(o + j) * depth + d] : 0;
}

/* ------------------------------------------------------------------------------------------------------------ elementwise */

static void norm(const float *x, const float *weight, float *to, int64_t n, float epsilon) {
    vec sum = {0};
    int64_t i = 0;
    for (; i + W <= n; i += W) sum += *(const vec *)(x + i) * *(const vec *)(x + i);
    float all = across(sum);
    for (; i < n; i++) all += x[i] * x[i];
    const float by = 1.0f / sqrtf(all / (float)n + epsilon);
    for (i = 0; i < n; i++) to[i] = x[i] * by * weight[i];
}

/* silu(gate) * up of the two halves of a row, into the first half. */
static void gated(float *both, int64_t inner) {
    const float *high = both + inner;
    int64_t i = 0;
    for (; i + W <= inner; i += W) {
        const vec x = *(vec *)(both + i);
        *(vec *)(both + i) = x / (1.0f + exponential(-x)) * *(const vec *)(high + i);
    }
    for (; i < inner; i++) both[i] = both[i] / (1.0f + expf(-both[i])) * high[i];
}

/* Rotary embedding; the sign of each sine is that of its term. */
static void rotate(const float *x, const float *cos, const float *sin, float by, float *to, int64_t stride, int64_t size) {
    const int64_t half = size / 2;
    for (int64_t d = 0; d < half; d++) to[d * stride] = (x[d] * cos[d] + x[d + half] * sin[d]) * by;
    for (int64_t d = half; d < size; d++) to[d * stride] = (x[d] * cos[d] + x[d - half] * sin[d]) * by;
}

/* --------------------------------------------------------------------------------------------------------------- attention */

/* Replace the first `length` scores by the numerators of their softmax and the others by 0; returns the sum. */
static float softmax_numerators(float *score, int64_t length, int64_t padded) {
    for (int64_t t = length; t < padded; t++) score[t] = -INFINITY;
    vec most = *(vec *)score, sum = {0};
    for (int64_t t = W; t < length; t += W) most = at_least(most, *(vec *)(score + t));
    float top = most[0];
    for (int j = 1; j < W; j++) top = most[j] > top ? most[j] : top;
    for (int64_t t = 0; t < length; t += W) *(vec *)(score + t) = exponential(*(vec *)(score + t) - top);
    for (int64_t t = length; t < padded; t++) score[t] = 0;
    for (int64_t t = 0; t < length; t += W) sum += *(vec *)(score + t);
    return across(sum);
}

/* Attention of `count` consecutive tokens of one row at one layer, for the key heads from `from` to `until`: to[count][heads * size]. */
static void attend(Step *s, int64_t layer, int64_t first, int64_t count, int64_t from, int64_t until, float *to, float *scratch) {
    const int64_t groups = s->heads / s->key_heads, size = s->size, wide = s->heads * size, many = count * groups;
    const int64_t longest = s->position[first + count - 1] + 1, stride = up(longest, PANEL) + PANEL;
    const int32_t *table = s->table + s->row[first] * s->table_width;
    float *q = scratch, *sum = q + many * size, *total = sum + many * s->padded, *score = total + many;
    for (int64_t k = from; k < until; k++) {
        for (int64_t i = 0; i < many; i++)
            memcpy(q + i * size, s->q + (first + i / groups) * wide + (k * groups + i % groups) * size, size * sizeof(float));
        for (int64_t start = 0, p = 0; start < longest; start += s->page, p++) {
            const int64_t here = longest - start < s->page ? longest - start : s->page;
            const float *keys = s->keys + ((layer * s->pages + table[p]) * s->key_heads + k) * size * s->room;
            for (int64_t t = 0; t < here; t += PANEL)
                for (int64_t i = 0; i < many; i += ROWS)
                    set2((int)(many - i < ROWS ? many - i : ROWS), q + i * size, size, keys + t, s->room, score + i * stride + start + t, stride, size, PANEL);
        }
        for (int64_t i = 0; i < many; i++) total[i] = softmax_numerators(score + i * stride, s->position[first + i / groups] + 1, stride);
        for (int64_t start = 0, p = 0; start < longest; start += s->page, p++) {
            const int64_t here = longest - start < s->page ? longest - start : s->page;
            const float *values = s->values + ((layer * s->pages + table[p]) * s->key_heads + k) * s->room * s->padded;
            for (int64_t d = 0; d < s->padded; d += PANEL)
                for (int64_t i = 0; i < many; i += ROWS) {
                    const int m = (int)(many - i < ROWS ? many - i : ROWS);
                    const float *a = score + i * stride + start, *b = values + d;
                    float *c = sum + i * s->padded + d;
                    if (d + PANEL <= s->padded)
                        (p ? add2 : set2)(m, a, stride, b, s->padded, c, s->padded, here, 8 * s->padded);
                    else
                        (p ? add1 : set1)(m, a, stride, b, s->padded, c, s->padded, here, 8 * s->padded);
                }
        }
        for (int64_t i = 0; i < many; i++) {
            float *out = to + (i / groups) * wide + (k * groups + i % groups) * size, by = 1.0f / total[i];
            for (int64_t d = 0; d < size; d++) out[d] = sum[i * s->padded + d] * by;
        }
    }
}

/* ---------------------------------------------------------------------------------------------------------------- the layers */

/* Rotate the queries and keys of token n, and store its keys and values in the cache. */
static void store(Step *s, int64_t layer, int64_t n, float *qkv) {
    const Layer *l = &s->layer[layer];
    const int64_t size = s->size, position = s->position[n], place = position % s->page;
    const int64_t page = s->table[s->row[n] * s->table_width + position / s->page];
    const float *cos = s->cos + position * size, *sin = s->sin + position * size;
    for (int64_t j = 0; j < s->heads + s->key_heads; j++) {
        const float *weight = j < s->heads ? l->q_norm : l->k_norm;
        if (weight) norm(qkv + j * size, weight, qkv + j * size, size, s->epsilon);
    }
    for (int64_t j = 0; j < s->heads; j++) rotate(qkv + j * size, cos, sin, s->scale, s->q + (n * s->heads + j) * size, 1, size);
    for (int64_t k = 0; k < s->key_heads; k++) {
        const int64_t head = (layer * s->pages + page) * s->key_heads + k;
        rotate(qkv + (s->heads + k) * size, cos, sin, 1, s->keys + head * size * s->room + place, s->room, size);
        memcpy(s->values + (head * s->room + place) * s->padded, qkv + (s->heads + s->key_heads + k) * size, size * sizeof(float));
    }
}

/* By tokens: queries, keys and values of some tokens at one layer. */
static void project_tokens(Step *s, int64_t layer, int64_t first, int64_t count, float *scratch) {
    const Layer *l = &s->layer[layer];
    const int64_t outs = (s->heads + 2 * s->key_heads) * s->size;
    float *h = scratch, *qkv = h + BLOCK * s->width;
    for (int64_t i = 0; i < count; i++) norm(s->x + (first + i) * s->width, l->before, h + i * s->width, s->width, s->epsilon);
    product(h, s->width, l->qkv, l->qkv_bias, qkv, outs, count, s->width, outs, 0);
    for (int64_t i = 0; i < count; i++) store(s, layer, first + i, qkv + i * outs);
}

/* By tokens: attention and the feed-forward network of some tokens at one layer. */
static void finish_tokens(Step *s, int64_t layer, int64_t first, int64_t count, float *scratch) {
    const Layer *l = &s->layer[layer];
    const int64_t wide = s->heads * s->size, groups = s->heads / s->key_heads, most = groups < QUERIES ? QUERIES / groups : 1;
    float *seen = scratch, *h = seen + BLOCK * wide, *both = h + BLOCK * s->width, *rest = both + BLOCK * 2 * s->inner, *x = s->x + first * s->width;
    for (int64_t i = 0, n; i < count; i += n) {
        for (n = 1; n < most && i + n < count && s->row[first + i + n] == s->row[first + i]; n++) {}
        attend(s, layer, first + i, n, 0, s->key_heads, seen + i * wide, rest);
    }
    product(seen, wide, l->out, l->out_bias, x, s->width, count, wide, s->width, 1);
    for (int64_t i = 0; i < count; i++) norm(x + i * s->width, l->between, h + i * s->width, s->width, s->epsilon);
    product(h, s->width, l->gate_up, l->gate_up_bias, both, 2 * s->inner, count, s->width, 2 * s->inner, 0);
    for (int64_t i = 0; i < count; i++) gated(both + i * 2 * s->inner, s->inner);
    product(both, 2 * s->inner, l->down, l->down_bias, x, s->width, count, s->inner, s->width, 1);
}

/* ---------------------------------------------------------------------------------------------------------------- sampling */

/* The token where the cumulative probability passes `uniform`, and its log-probability. At temperature 0 the likeliest, with its
   log-probability at temperature 1. */
static void draw(float *logit, int64_t count, int64_t padded, double temperature, double uniform, int64_t *token, double *logprob) {
    const float heat = temperature == 0 ? 1.0f : (float)temperature;
    for (int64_t i = 0; i < count; i++) logit[i] /= heat;
    for (int64_t i = count; i < padded; i++) logit[i] = -INFINITY;
    vec most = *(vec *)logit;
    for (int64_t i = W; i < padded; i += W) most = at_least(most, *(vec *)(logit + i));
    float top = most[0];
    for (int j = 1; j < W; j++) top = most[j] > top ? most[j] : top;
    const int64_t runs = up(padded, RUN) / RUN;
    double total = 0, part[runs];
    for (int64_t r = 0; r < runs; r++) {
        vec sum = {0};
        for (int64_t i = r * RUN; i < padded && i < (r + 1) * RUN; i += W) sum += exponential(*(vec *)(logit + i) - top);
        total += part[r] = across(sum);
    }
    const double all = log(total) + top;
    int64_t found = 0;
    if (temperature == 0) {
        while (found < count - 1 && logit[found] != top) found++;
    } else {
        double before = 0;
        int64_t r = 0;
        while (r < runs - 1 && before + part[r] <= uniform * total) before += part[r++];
        for (found = r * RUN; found < count - 1; found++)
            if ((before += expf(logit[found] - top)) > uniform * total) break;
    }
    while (found > 0 && logit[found] == -INFINITY) found--; /* rounding at the end, where a schema excludes tokens */
    *token = found;
    *logprob = logit[found] - all;
}

/* Subtract the penalties of one request's tokens; exclude the tokens that its schema does not allow. */
static void edit(const Step *s, int64_t i, float *logit) {
    for (int64_t n = s->penalties[i]; n < s->penalties[i + 1]; n++) logit[s->penalized[n]] -= s->penalty[n];
    const uint8_t *allowed = s->allowed[i];
    for (int64_t v = 0; allowed && v < s->vocabulary; v++)
        if (!(allowed[v >> 3] >> (v & 7) & 1)) logit[v] = -INFINITY;
}

/* Sample the i-th token from its logits. */
static void sample(Step *s, int64_t i, float *logits, int64_t padded) {
    if (s->allowed) edit(s, i, logits);
    if (s->logits && s->logits[i]) memcpy(s->logits[i], logits, s->vocabulary * sizeof(float));
    draw(logits, s->vocabulary, padded, s->temperature[i], s->uniform[i], s->drawn + i, s->logprob + i);
}

/* By tokens: sample those from `from` to `to`. */
static void sample_tokens(Step *s, int64_t from, int64_t to, float *scratch) {
    const int64_t padded = up(s->vocabulary, PANEL);
    float *h = scratch, *logits = h + BLOCK * s->width;
    for (int64_t i = from; i < to; i += BLOCK) {
        const int64_t count = to - i < BLOCK ? to - i : BLOCK;
        for (int64_t j = 0; j < count; j++) norm(s->x + s->after[i + j] * s->width, s->last, h + j * s->width, s->width, s->epsilon);
        product(h, s->width, s->head, s->head_bias, logits, padded, count, s->width, s->vocabulary, 0);
        for (int64_t j = 0; j < count; j++) sample(s, i + j, logits + j * padded, padded);
    }
}

/* ----------------------------------------------------------------------------------------------------------------- threads */

/* Floats of memory that attention needs per thread, if no context is longer than `longest`. */
static int64_t attention_floats(const Step *s, int64_t longest) {
    return larger(QUERIES, s->heads / s->key_heads) * (s->size + s->padded + 1 + up(longest, PANEL) + PANEL);
}

/* Floats of memory per thread, if no context is longer than `longest`. */
int64_t scratch_floats(const Step *s, int64_t longest) {
    const int64_t first = BLOCK * (s->width + (s->heads + 2 * s->key_heads) * s->size);
    const int64_t second = BLOCK * (s->heads * s->size + s->width + 2 * s->inner) + attention_floats(s, longest);
    return larger(larger(first, second), BLOCK * (s->width + up(s->vocabulary, PANEL)));
}

/* Floats of memory of all threads together in the mode by columns, for the tokens of this step. */
int64_t shared_floats(const Step *s) {
    const int64_t each = s->width + 2 * (s->heads + s->key_heads) * s->size + 2 * s->inner;
    return larger(s->tokens, BLOCK) * each + BLOCK * up(s->vocabulary, PANEL);
}

/* Wait for all threads. A thread yields the processor only after about a millisecond: others may not have started, but where another
   process wants this core, yielding costs the rest of a time slice. */
static void barrier(Step *s) {
    const int round = atomic_load(&s->round);
    if (atomic_fetch_add(&s->arrived, 1) == s->parts - 1) {
        atomic_store(&s->arrived, 0);
        atomic_store(&s->next, 0);
        atomic_fetch_add(&s->round, 1);
        return;
    }
    for (int tries = 0; atomic_load(&s->round) == round; tries++) {
        spin_hint();
        if (tries > SPINS) sched_yield();
    }
}

/* By columns: `product` by all threads, which wait for the result. Each takes units of some panels and rows until none is left. */
static void shared_product(Step *s, const float *a, int64_t lda, const float *packed, const float *bias, float *c, int64_t ldc, int64_t rows,
                           int64_t depth, int64_t outs, int add) {
    const int64_t panels = up(outs, PANEL) / PANEL, wanted = UNITS * s->parts, each = larger(1, panels / wanted) * PANEL;
    const int64_t most = up(rows, ROWS) / ROWS, pieces = panels >= wanted ? 1 : larger(1, most < wanted / panels ? most : wanted / panels);
    for (int64_t unit, o; (o = each * ((unit = atomic_fetch_add(&s->next, 1)) / pieces)) < outs;) {
        const int64_t first = rows * (unit % pieces) / pieces, last = rows * (unit % pieces + 1) / pieces;
        product(a + first * lda, lda, packed + o * depth, bias ? bias + o : 0, c + first * ldc + o, ldc, last - first, depth,
                outs - o < each ? outs - o : each, add);
    }
    barrier(s);
}

/* By columns: one thread's part of the step. */
static void run_columns(Step *s, int64_t part) {
    const int64_t tokens = s->tokens, width = s->width, wide = s->heads * s->size, outs = (s->heads + 2 * s->key_heads) * s->size;
    const int64_t from = tokens * part / s->parts, to = tokens * (part + 1) / s->parts, padded = up(s->vocabulary, PANEL), inner = s->inner;
    float *scratch = s->scratch + part * s->scratch_each;
    float *h = s->shared, *qkv = h + larger(tokens, BLOCK) * width, *seen = qkv + tokens * outs, *both = seen + tokens * wide;
    float *logits = both + tokens * 2 * inner;
    for (int64_t n = from; n < to; n++) memcpy(s->x + n * width, s->embedding + s->token[n] * width, width * sizeof(float));
    for (int64_t layer = 0; layer < s->layers; layer++) {
        const Layer *l = &s->layer[layer];
        for (int64_t n = from; n < to; n++) norm(s->x + n * width, l->before, h + n * width, width, s->epsilon);
        barrier(s);
        shared_product(s, h, width, l->qkv, l->qkv_bias, qkv, outs, tokens, width, outs, 0);
        for (int64_t n = from; n < to; n++) store(s, layer, n, qkv + n * outs);
        barrier(s);
        for (int64_t unit; (unit = atomic_fetch_add(&s->next, 1)) < tokens * s->key_heads;) {
            const int64_t n = unit / s->key_heads, k = unit % s->key_heads;
            attend(s, layer, n, 1, k, k + 1, seen + n * wide, scratch);
        }
        barrier(s);
        shared_product(s, seen, wide, l->out, l->out_bias, s->x, width, tokens, wide, width, 1);
        for (int64_t n = from; n < to; n++) norm(s->x + n * width, l->between, h + n * width, width, s->epsilon);
        barrier(s);
        shared_product(s, h, width, l->gate_up, l->gate_up_bias, both, 2 * inner, tokens, width, 2 * inner, 0);
        for (int64_t n = from; n < to; n++) gated(both + n * 2 * inner, inner);
        barrier(s);
        shared_product(s, both, 2 * inner, l->down, l->down_bias, s->x, width, tokens, inner, width, 1);
    }
    for (int64_t i = 0; i < s->sampled; i += BLOCK) {
        const int64_t count = s->sampled - i < BLOCK ? s->sampled - i : BLOCK;
        for (int64_t j = part; j < count; j += s->parts) norm(s->x + s->after[i + j] * width, s->last, h + j * width, width, s->epsilon);
        barrier(s);
        shared_product(s, h, width, s->head, s->head_bias, logits, padded, count, width, s->vocabulary, 0);
        for (int64_t j; (j = atomic_fetch_add(&s->next, 1)) < count;) sample(s, i + j, logits + j * padded, padded);
        barrier(s);
    }
}

/* By tokens: one thread's part of the step. */
static void run_tokens(Step *s, int64_t part) {
    const int64_t from = s->bounds[part], to = s->bounds[part + 1];
    float *scratch = s->scratch + part * s->scratch_each;
    for (int64_t n = from; n < to; n++) memcpy(s->x + n * s->width, s->embedding + s->token[n] * s->width, s->width * sizeof(float));
    for (int64_t layer = 0; layer < s->layers; layer++) {
        for (int64_t n = from; n < to; n += BLOCK) project_tokens(s, layer, n, to - n < BLOCK ? to - n : BLOCK, scratch);
        if (s->parts > 1 && !s->apart) barrier(s);
        for (int64_t n = from; n < to; n += BLOCK) finish_tokens(s, layer, n, to - n < BLOCK ? to - n : BLOCK, scratch);
    }
    int64_t first = 0, last = 0;
    while (first < s->sampled && s->after[first] < from) first++;
    for (last = first; last < s->sampled && s->after[last] < to; last++) {}
    sample_tokens(s, first, last, scratch);
}

/* One thread's part of the step. */
void run(Step *s, int64_t part) {
    if (s->columns) run_columns(s, part);
    else run_tokens(s, part);
}
