/* One sampling step of Llama and its relatives on a CPU, in float32: new tokens in, sampled tokens out.

   Plain C with the vectors of GCC and Clang, for any processor: `cpu_step.py` compiles it where it runs. Weights come packed in panels
   of PANEL outputs (`pack`), so a product reads them one after the other. Keys lie with their tokens side by side and values with their
   numbers side by side: scores and sums over values are then products of the same form as those with weights, over the pages in place.
   A token's numbers do not depend on the tokens beside it.

   The tokens of a step are divided among threads that call `run` at once, each with its part. They meet only where the tokens of one
   sequence are in two parts, once a layer: its keys must be there before they are looked at. */

#include <math.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <string.h>

#include "vectors.h"

#define QUERIES 8 /* attended at once, as far as they are of one sequence and key head */
#define BLOCK 48  /* tokens that go through a layer at once: what they leave between products stays in the cache */
#define RUN (16 * W) /* probabilities that are added up before it is asked whether the token is among them */

typedef struct {
    const float *qkv, *qkv_bias, *q_norm, *k_norm, *out, *out_bias, *gate_up, *gate_up_bias, *down, *down_bias;
    const float *before, *between; /* weights of the norms */
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
    /* the step: of each token its id, position and row; of each row its pages */
    int64_t tokens, table_width, sampled;
    const int32_t *token, *position, *row, *table;
    float *x, *q; /* [tokens, width], [tokens, heads * size]: between the two halves of a layer */
    /* what is drawn, in the order of the tokens it is drawn after */
    const int64_t *after;
    const double *temperature, *uniform;
    float *const *logits; /* of each where they are wanted or null, or null */
    const uint8_t *const *allowed; /* of each its tokens that a schema allows (bits) or null; null if no logits are edited */
    const int64_t *penalties, *penalized; /* the i-th has those from penalties[i] to penalties[i + 1] */
    const float *penalty;
    int64_t *drawn;
    double *logprob;
    /* threads */
    int64_t parts, apart; /* whether no sequence is in two parts */
    const int64_t *bounds; /* part i has the tokens from bounds[i] to bounds[i + 1] */
    float *scratch;
    int64_t scratch_each;
    atomic_int arrived, round;
} Step;

int64_t panel(void) { return PANEL; }
int64_t lanes(void) { return W; }
int64_t step_bytes(void) { return sizeof(Step); }

/* ---------------------------------------------------------------------------------------------------------------- products */

/* Rows at once, so that all tiles are about as high. */
static int64_t even(int64_t rows) { return rows ? up(rows, up(rows, ROWS) / ROWS) / (up(rows, ROWS) / ROWS) : 1; }

/* c[rows][outs] = a[rows][depth] times packed weights, or added to what is there. */
static void product(const float *a, int64_t lda, const float *packed, const float *bias, float *c, int64_t ldc, int64_t rows, int64_t depth,
                    int64_t outs, int add) {
    const int64_t high = even(rows);
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

/* weight[outs][depth] in panels of PANEL outputs, the last filled up with zeros. */
void pack(const float *weight, float *packed, int64_t outs, int64_t depth) {
    for (int64_t o = 0; o < outs; o += PANEL)
        for (int64_t d = 0; d < depth; d++)
            for (int64_t j = 0; j < PANEL; j++) packed[o * depth + d * PANEL + j] = o + j < outs ? weight[(o + j) * depth + d] : 0;
}

/* ------------------------------------------------------------------------------------------------------------ number by number */

static void norm(const float *x, const float *weight, float *to, int64_t n, float epsilon) {
    vec sum = {0};
    int64_t i = 0;
    for (; i + W <= n; i += W) sum += *(const vec *)(x + i) * *(const vec *)(x + i);
    float all = across(sum);
    for (; i < n; i++) all += x[i] * x[i];
    const float by = 1.0f / sqrtf(all / (float)n + epsilon);
    for (i = 0; i < n; i++) to[i] = x[i] * by * weight[i];
}

/* silu(gate) * up, of what lies side by side, into the first half. */
static void gated(float *both, int64_t inner) {
    const float *high = both + inner;
    int64_t i = 0;
    for (; i + W <= inner; i += W) {
        const vec x = *(vec *)(both + i);
        *(vec *)(both + i) = x / (1.0f + exponential(-x)) * *(const vec *)(high + i);
    }
    for (; i < inner; i++) both[i] = both[i] / (1.0f + expf(-both[i])) * high[i];
}

/* The position embedding turns halves; the sines have the signs that this needs. */
static void turned(const float *x, const float *cos, const float *sin, float by, float *to, int64_t stride, int64_t size) {
    const int64_t half = size / 2;
    for (int64_t d = 0; d < half; d++) to[d * stride] = (x[d] * cos[d] + x[d + half] * sin[d]) * by;
    for (int64_t d = half; d < size; d++) to[d * stride] = (x[d] * cos[d] + x[d - half] * sin[d]) * by;
}

/* --------------------------------------------------------------------------------------------------------------- attention */

/* Scores become weights, by the way not yet divided by their sum, which is returned; `length` of them count. */
static float weigh(float *score, int64_t length, int64_t padded) {
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

/* `count` tokens of one row, one after the other, at one layer: to[count][heads * size]. */
static void attend(Step *s, int64_t layer, int64_t first, int64_t count, float *to, float *scratch) {
    const int64_t groups = s->heads / s->key_heads, size = s->size, wide = s->heads * size, many = count * groups;
    const int64_t longest = s->position[first + count - 1] + 1, stride = up(longest, PANEL) + PANEL;
    const int32_t *table = s->table + s->row[first] * s->table_width;
    float *q = scratch, *sum = q + many * size, *total = sum + many * s->padded, *score = total + many;
    for (int64_t k = 0; k < s->key_heads; k++) {
        for (int64_t i = 0; i < many; i++)
            memcpy(q + i * size, s->q + (first + i / groups) * wide + (k * groups + i % groups) * size, size * sizeof(float));
        for (int64_t start = 0, p = 0; start < longest; start += s->page, p++) {
            const int64_t here = longest - start < s->page ? longest - start : s->page;
            const float *keys = s->keys + ((layer * s->pages + table[p]) * s->key_heads + k) * size * s->room;
            for (int64_t t = 0; t < here; t += PANEL)
                for (int64_t i = 0; i < many; i += ROWS)
                    set2((int)(many - i < ROWS ? many - i : ROWS), q + i * size, size, keys + t, s->room, score + i * stride + start + t, stride, size, PANEL);
        }
        for (int64_t i = 0; i < many; i++) total[i] = weigh(score + i * stride, s->position[first + i / groups] + 1, stride);
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

/* Queries for later, keys and values into their pages. */
static void look(Step *s, int64_t layer, int64_t first, int64_t count, float *scratch) {
    const Layer *l = &s->layer[layer];
    const int64_t size = s->size, outs = (s->heads + 2 * s->key_heads) * size;
    float *h = scratch, *qkv = h + BLOCK * s->width;
    for (int64_t i = 0; i < count; i++) norm(s->x + (first + i) * s->width, l->before, h + i * s->width, s->width, s->epsilon);
    product(h, s->width, l->qkv, l->qkv_bias, qkv, outs, count, s->width, outs, 0);
    for (int64_t i = 0; i < count; i++) {
        const int64_t n = first + i, position = s->position[n], place = position % s->page;
        const int64_t page = s->table[s->row[n] * s->table_width + position / s->page];
        const float *cos = s->cos + position * size, *sin = s->sin + position * size;
        float *from = qkv + i * outs;
        for (int64_t j = 0; j < s->heads + s->key_heads; j++) {
            const float *weight = j < s->heads ? l->q_norm : l->k_norm;
            if (weight) norm(from + j * size, weight, from + j * size, size, s->epsilon);
        }
        for (int64_t j = 0; j < s->heads; j++) turned(from + j * size, cos, sin, s->scale, s->q + (n * s->heads + j) * size, 1, size);
        for (int64_t k = 0; k < s->key_heads; k++) {
            const int64_t head = (layer * s->pages + page) * s->key_heads + k;
            turned(from + (s->heads + k) * size, cos, sin, 1, s->keys + head * size * s->room + place, s->room, size);
            memcpy(s->values + (head * s->room + place) * s->padded, from + (s->heads + s->key_heads + k) * size, size * sizeof(float));
        }
    }
}

/* Attention, and what follows it in the layer. */
static void think(Step *s, int64_t layer, int64_t first, int64_t count, float *scratch) {
    const Layer *l = &s->layer[layer];
    const int64_t wide = s->heads * s->size, groups = s->heads / s->key_heads, most = groups < QUERIES ? QUERIES / groups : 1;
    float *seen = scratch, *h = seen + BLOCK * wide, *both = h + BLOCK * s->width, *rest = both + BLOCK * 2 * s->inner, *x = s->x + first * s->width;
    for (int64_t i = 0, n; i < count; i += n) {
        for (n = 1; n < most && i + n < count && s->row[first + i + n] == s->row[first + i]; n++) {}
        attend(s, layer, first + i, n, seen + i * wide, rest);
    }
    product(seen, wide, l->out, l->out_bias, x, s->width, count, wide, s->width, 1);
    for (int64_t i = 0; i < count; i++) norm(x + i * s->width, l->between, h + i * s->width, s->width, s->epsilon);
    product(h, s->width, l->gate_up, l->gate_up_bias, both, 2 * s->inner, count, s->width, 2 * s->inner, 0);
    for (int64_t i = 0; i < count; i++) gated(both + i * 2 * s->inner, s->inner);
    product(both, 2 * s->inner, l->down, l->down_bias, x, s->width, count, s->inner, s->width, 1);
}

/* ---------------------------------------------------------------------------------------------------------------- the tokens */

/* The token where the cumulative probability passes `uniform`, and its log-probability; the likeliest at temperature 0, scored as at 1. */
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

static void say(Step *s, int64_t from, int64_t to, float *scratch) {
    const int64_t padded = up(s->vocabulary, PANEL);
    float *h = scratch, *logits = h + BLOCK * s->width;
    for (int64_t i = from; i < to; i += BLOCK) {
        const int64_t count = to - i < BLOCK ? to - i : BLOCK;
        for (int64_t j = 0; j < count; j++) norm(s->x + s->after[i + j] * s->width, s->last, h + j * s->width, s->width, s->epsilon);
        product(h, s->width, s->head, s->head_bias, logits, padded, count, s->width, s->vocabulary, 0);
        for (int64_t j = 0; j < count; j++) {
            if (s->allowed) edit(s, i + j, logits + j * padded);
            if (s->logits && s->logits[i + j]) memcpy(s->logits[i + j], logits + j * padded, s->vocabulary * sizeof(float));
            draw(logits + j * padded, s->vocabulary, padded, s->temperature[i + j], s->uniform[i + j], s->drawn + i + j, s->logprob + i + j);
        }
    }
}

/* Numbers each thread needs room for, where no context is longer than `longest`. */
int64_t scratch_floats(const Step *s, int64_t longest) {
    const int64_t queries = larger(QUERIES, s->heads / s->key_heads), each = s->size + s->padded + 1 + up(longest, PANEL) + PANEL;
    const int64_t looking = BLOCK * (s->width + (s->heads + 2 * s->key_heads) * s->size);
    const int64_t thinking = BLOCK * (s->heads * s->size + s->width + 2 * s->inner) + queries * each;
    return larger(larger(looking, thinking), BLOCK * (s->width + up(s->vocabulary, PANEL)));
}

/* Wait until all threads are here. The others may not have begun: the processor is left to them after a while. */
static void meet(Step *s) {
    if (s->parts < 2 || s->apart) return;
    const int round = atomic_load(&s->round);
    if (atomic_fetch_add(&s->arrived, 1) == s->parts - 1) {
        atomic_store(&s->arrived, 0);
        atomic_fetch_add(&s->round, 1);
        return;
    }
    for (int tries = 0; atomic_load(&s->round) == round; tries++)
        if (tries > 2000) sched_yield();
}

/* One thread's part of the step. */
void run(Step *s, int64_t part) {
    const int64_t from = s->bounds[part], to = s->bounds[part + 1];
    float *scratch = s->scratch + part * s->scratch_each;
    for (int64_t n = from; n < to; n++) memcpy(s->x + n * s->width, s->embedding + s->token[n] * s->width, s->width * sizeof(float));
    for (int64_t layer = 0; layer < s->layers; layer++) {
        for (int64_t n = from; n < to; n += BLOCK) look(s, layer, n, to - n < BLOCK ? to - n : BLOCK, scratch);
        meet(s);
        for (int64_t n = from; n < to; n += BLOCK) think(s, layer, n, to - n < BLOCK ? to - n : BLOCK, scratch);
    }
    int64_t first = 0, last = 0;
    while (first < s->sampled && s->after[first] < from) first++;
    for (last = first; last < s->sampled && s->after[last] < to; last++) {}
    say(s, first, last, scratch);
}
