/* Attention over trees on a CPU, in float32: token q sees token k exactly when k <= q < end[k]; forward and backward.

   `cpu_kernels.py` compiles it at run time. The tokens of a tree are in depth-first order, so the keys that a token sees are the entries
   of a stack: blocks of tokens are processed in order, entries whose subtrees have ended are popped, and the block's own are pushed. Keys
   and values are copied onto the stack once, and their gradients are summed on it until they are popped. Nothing is gathered, and no
   product is computed for a pair of tokens in different branches, except within one block.

   A work item is one tree and one key head with the query heads that share it. Threads call `forward` or `backward` concurrently and take
   one item after the other; no sum depends on which thread took which item. */

#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "vectors.h"

#define QUERIES 64 /* rows of a block: tokens times the query heads that share a key head */
#define LEAST 8    /* tokens of a block, however many heads share a key head */
#define KEYS 256   /* looked at at once: their scores stay in the cache */

typedef struct {
    int64_t trees, heads, key_heads, size, window; /* of no window: 0 */
    float scale;
    const int64_t *start, *end, *depth;        /* tree i has the tokens from start[i] to start[i + 1] */
    const float *q, *k, *v, *grad;             /* numbers of a head side by side */
    int64_t q_token, q_head, k_token, k_head, v_token, v_head, grad_token, grad_head; /* from one to the next */
    float *out, *lse;                          /* [tokens, heads, size], [tokens, heads] */
    float *to_q, *to_k, *to_v;                 /* gradients, as [tokens, heads, size] and [tokens, key heads, size] */
    atomic_llong next;
    atomic_int failed;
} Attention;

int64_t attention_bytes(void) { return sizeof(Attention); }

/* What a block looks at, and room for what it computes. `wide` are the numbers of a head filled up to whole vectors. */
typedef struct {
    int64_t room, wide, groups, tokens, rows; /* entries there is room for; tokens and rows of a block */
    int64_t *key;                             /* [room], which token an entry is */
    int32_t *end, *depth;                     /* [room], as vectors compare them */
    float *keys, *values;                     /* [room, wide] */
    float *keys_across, *values_across;       /* [size, room] */
    float *to_keys, *to_values;               /* [room, wide] */
    float *q, *grad, *sum;                    /* [rows, wide] */
    float *score, *slope;                     /* [rows, KEYS + PANEL] */
    float *top, *total, *lse, *delta;         /* [rows] */
} Stack;

#define STRIDE (KEYS + PANEL)

/* One allocation, laid out from `from` on; null where only its size is asked for. */
static int64_t lay(Stack *s, int64_t size, char *from) {
    int64_t at = 0;
#define TAKE(field, count)                            \
    s->field = from ? (void *)(from + at) : NULL;     \
    at += up((count) * (int64_t)sizeof(*s->field), 64);
    TAKE(key, s->room) TAKE(end, s->room) TAKE(depth, s->room)
    TAKE(keys, s->room * s->wide) TAKE(values, s->room * s->wide) TAKE(to_keys, s->room * s->wide) TAKE(to_values, s->room * s->wide)
    TAKE(keys_across, size * s->room) TAKE(values_across, size * s->room)
    TAKE(q, s->rows * s->wide) TAKE(grad, s->rows * s->wide) TAKE(sum, s->rows * s->wide)
    TAKE(score, s->rows * STRIDE) TAKE(slope, s->rows * STRIDE)
    TAKE(top, s->rows) TAKE(total, s->rows) TAKE(lse, s->rows) TAKE(delta, s->rows)
    return at + 64;
}

/* c[rows][wide] (+)= a b, in parts that fit into registers; what is taken of b at a time stays in the cache meanwhile. */
static void product(int64_t rows, const float *a, int64_t lda, const float *b, int64_t ldb, float *c, int64_t ldc, int64_t depth, int64_t wide, int add) {
    for (int64_t j = 0; j < wide; j += PANEL)
        for (int64_t r = 0; r < rows; r += ROWS) {
            const int m = (int)(rows - r < ROWS ? rows - r : ROWS);
            if (j + PANEL <= wide)
                (add ? add2 : set2)(m, a + r * lda, lda, b + j, ldb, c + r * ldc + j, ldc, depth, 0);
            else
                (add ? add1 : set1)(m, a + r * lda, lda, b + j, ldb, c + r * ldc + j, ldc, depth, 0);
        }
}

/* c[rows][wide] += a[depth][rows] turned, times b. */
static void product_turned(int64_t rows, const float *a, int64_t lda, const float *b, int64_t ldb, float *c, int64_t ldc, int64_t depth, int64_t wide) {
    for (int64_t r = 0; r < rows; r += ROWS) {
        const int m = (int)(rows - r < ROWS ? rows - r : ROWS);
        int64_t j = 0;
        for (; j + PANEL <= wide; j += PANEL) turned2(m, a + r, lda, b + j, ldb, c + r * ldc + j, ldc, depth, 0);
        for (; j < wide; j += W) turned1(m, a + r, lda, b + j, ldb, c + r * ldc + j, ldc, depth, 0);
    }
}

static float dot(const float *a, const float *b, int64_t n) {
    vec sum = {0};
    int64_t i = 0;
    for (; i + W <= n; i += W) sum += *(const vec *)(a + i) * *(const vec *)(b + i);
    float all = across(sum);
    for (; i < n; i++) all += a[i] * b[i];
    return all;
}

/* Token n becomes the entry at `place`. */
static void push(const Attention *a, Stack *s, int64_t head, int64_t n, int64_t place, int back) {
    const float *k = a->k + n * a->k_token + head * a->k_head, *v = a->v + n * a->v_token + head * a->v_head;
    s->key[place] = n;
    s->end[place] = (int32_t)a->end[n];
    s->depth[place] = (int32_t)a->depth[n];
    for (int64_t d = 0; d < a->size; d++) s->keys_across[d * s->room + place] = k[d];
    if (!back) {
        memcpy(s->values + place * s->wide, v, a->size * sizeof(float));
        return;
    }
    for (int64_t d = 0; d < a->size; d++) s->values_across[d * s->room + place] = v[d];
    memcpy(s->keys + place * s->wide, k, a->size * sizeof(float));
    memset(s->to_keys + place * s->wide, 0, s->wide * sizeof(float));
    memset(s->to_values + place * s->wide, 0, s->wide * sizeof(float));
}

static void move(const Attention *a, Stack *s, int64_t from, int64_t to, int back) {
    s->key[to] = s->key[from], s->end[to] = s->end[from], s->depth[to] = s->depth[from];
    for (int64_t d = 0; d < a->size; d++) s->keys_across[d * s->room + to] = s->keys_across[d * s->room + from];
    if (!back) {
        memcpy(s->values + to * s->wide, s->values + from * s->wide, s->wide * sizeof(float));
        return;
    }
    for (int64_t d = 0; d < a->size; d++) s->values_across[d * s->room + to] = s->values_across[d * s->room + from];
    memcpy(s->keys + to * s->wide, s->keys + from * s->wide, s->wide * sizeof(float));
    memcpy(s->to_keys + to * s->wide, s->to_keys + from * s->wide, s->wide * sizeof(float));
    memcpy(s->to_values + to * s->wide, s->to_values + from * s->wide, s->wide * sizeof(float));
}

/* Entries whose subtrees are over before token `next` leave, and their gradients are then whole. Ends fall from the bottom of the stack
   to its top, but among the tokens of one block, which begin at `fresh`. How many remain is returned. */
static int64_t leave(const Attention *a, Stack *s, int64_t head, int64_t held, int64_t fresh, int64_t next, int back) {
    int64_t kept = fresh;
    while (kept > 0 && s->end[kept - 1] <= next) kept--;
    for (int64_t i = kept; i < held; i++) {
        if (s->end[i] > next) {
            if (i != kept) move(a, s, i, kept, back);
            kept++;
        } else if (back) {
            const int64_t at = (s->key[i] * a->key_heads + head) * a->size;
            memcpy(a->to_k + at, s->to_keys + i * s->wide, a->size * sizeof(float));
            memcpy(a->to_v + at, s->to_values + i * s->wide, a->size * sizeof(float));
        }
    }
    return kept;
}

/* Zeros where the token `n` does not see an entry; else all bits. Entries from `fresh` on are of its own block. */
ALWAYS ivec sees(const Attention *a, const Stack *s, int64_t n, int64_t i, int64_t fresh, int64_t held) {
    ivec entry;
    for (int j = 0; j < W; j++) entry[j] = (int32_t)i + j;
    const int64_t own = fresh + n - s->key[fresh];
    ivec seen = (*(const ivec *)(s->end + i) > (int32_t)n) & (entry <= (int32_t)own) & (entry < (int32_t)held);
    if (a->window) seen &= *(const ivec *)(s->depth + i) > (int32_t)(a->depth[n] - a->window);
    return seen;
}

/* Entries below this one are seen by all tokens of the block, and those from `first` on by some. */
static int64_t free_of_masks(const Attention *a, const Stack *s, int64_t fresh, int64_t last, int64_t from) {
    if (a->window) return from;
    int64_t free = fresh;
    while (free > 0 && s->end[free - 1] <= last) free--;
    return free;
}

/* The queries of a block, one row a token and query head, times the scale. */
static void take(const float *x, int64_t token, int64_t head, float by, Stack *s, int64_t size, int64_t begin, int64_t count, int64_t first, float *to) {
    for (int64_t i = 0; i < count * s->groups; i++) {
        const float *from = x + (begin + i / s->groups) * token + (first + i % s->groups) * head;
        for (int64_t d = 0; d < size; d++) to[i * s->wide + d] = from[d] * by;
    }
}

static void attend(const Attention *a, Stack *s, int64_t head, int64_t begin, int64_t count, int64_t fresh, int64_t held, int64_t lowest) {
    const int64_t rows = count * s->groups, first = head * s->groups;
    const int64_t free = free_of_masks(a, s, fresh, begin + count - 1, lowest);
    take(a->q, a->q_token, a->q_head, a->scale, s, a->size, begin, count, first, s->q);
    memset(s->sum, 0, rows * s->wide * sizeof(float));
    for (int64_t i = 0; i < rows; i++) s->top[i] = -INFINITY, s->total[i] = 0;
    for (int64_t from = lowest; from < held; from += KEYS) {
        const int64_t here = held - from < KEYS ? held - from : KEYS;
        product(rows, s->q, s->wide, s->keys_across + from, s->room, s->score, STRIDE, a->size, up(here, W), 0);
        for (int64_t i = 0; i < rows; i++) {
            float *score = s->score + i * STRIDE, top = s->top[i];
            const int64_t n = begin + i / s->groups;
            vec most = (vec){0} + top, sum = {0};
            for (int64_t t = 0; t < here; t += W) {
                vec *x = (vec *)(score + t);
                if (from + t + W > free) {
                    const ivec seen = sees(a, s, n, from + t, fresh, held);
                    *x = (vec)((seen & (ivec)*x) | (~seen & (ivec)((vec){0} - INFINITY)));
                }
                most = at_least(most, *x);
            }
            for (int j = 0; j < W; j++) top = most[j] > top ? most[j] : top;
            if (top == -INFINITY) {
                memset(score, 0, here * sizeof(float));
                continue;
            }
            for (int64_t t = 0; t < here; t += W) {
                vec *x = (vec *)(score + t);
                const ivec seen = *x != (vec){0} - INFINITY;
                *x = (vec)(seen & (ivec)exponential(*x - top));
                sum += *x;
            }
            if (top > s->top[i]) {
                const float by = s->top[i] == -INFINITY ? 0 : expf(s->top[i] - top);
                s->total[i] *= by;
                for (int64_t d = 0; d < s->wide; d += W) *(vec *)(s->sum + i * s->wide + d) *= by;
                s->top[i] = top;
            }
            s->total[i] += across(sum);
        }
        product(rows, s->score, STRIDE, s->values + from * s->wide, s->wide, s->sum, s->wide, here, s->wide, 1);
    }
    for (int64_t i = 0; i < rows; i++) {
        const int64_t at = (begin + i / s->groups) * a->heads + first + i % s->groups;
        const float by = 1.0f / s->total[i];
        for (int64_t d = 0; d < a->size; d++) a->out[at * a->size + d] = s->sum[i * s->wide + d] * by;
        a->lse[at] = s->top[i] + logf(s->total[i]);
    }
}

static void attend_back(const Attention *a, Stack *s, int64_t head, int64_t begin, int64_t count, int64_t fresh, int64_t held, int64_t lowest) {
    const int64_t rows = count * s->groups, first = head * s->groups;
    const int64_t free = free_of_masks(a, s, fresh, begin + count - 1, lowest);
    take(a->q, a->q_token, a->q_head, a->scale, s, a->size, begin, count, first, s->q);
    take(a->grad, a->grad_token, a->grad_head, 1, s, a->size, begin, count, first, s->grad);
    memset(s->sum, 0, rows * s->wide * sizeof(float));
    for (int64_t i = 0; i < rows; i++) {
        const int64_t at = (begin + i / s->groups) * a->heads + first + i % s->groups;
        s->delta[i] = dot(s->grad + i * s->wide, a->out + at * a->size, a->size);
        s->lse[i] = a->lse[at];
    }
    for (int64_t from = lowest; from < held; from += KEYS) {
        const int64_t here = held - from < KEYS ? held - from : KEYS;
        product(rows, s->q, s->wide, s->keys_across + from, s->room, s->score, STRIDE, a->size, up(here, W), 0);
        product(rows, s->grad, s->wide, s->values_across + from, s->room, s->slope, STRIDE, a->size, up(here, W), 0);
        for (int64_t i = 0; i < rows; i++) {
            float *score = s->score + i * STRIDE, *slope = s->slope + i * STRIDE;
            const int64_t n = begin + i / s->groups;
            for (int64_t t = 0; t < here; t += W) {
                vec weight = exponential(*(vec *)(score + t) - s->lse[i]), slant = *(vec *)(slope + t) - s->delta[i];
                if (from + t + W > free) {
                    const ivec seen = sees(a, s, n, from + t, fresh, held);
                    weight = (vec)(seen & (ivec)weight), slant = (vec)(seen & (ivec)slant);
                }
                *(vec *)(score + t) = weight;
                *(vec *)(slope + t) = weight * slant;
            }
        }
        product_turned(here, s->score, STRIDE, s->grad, s->wide, s->to_values + from * s->wide, s->wide, rows, s->wide);
        product_turned(here, s->slope, STRIDE, s->q, s->wide, s->to_keys + from * s->wide, s->wide, rows, s->wide);
        product(rows, s->slope, STRIDE, s->keys + from * s->wide, s->wide, s->sum, s->wide, here, s->wide, 1);
    }
    for (int64_t i = 0; i < rows; i++) {
        const int64_t at = (begin + i / s->groups) * a->heads + first + i % s->groups;
        for (int64_t d = 0; d < a->size; d++) a->to_q[at * a->size + d] = s->sum[i * s->wide + d] * a->scale;
    }
}

/* One tree and key head. */
static void segment(const Attention *a, Stack *s, int64_t tree, int64_t head, int back) {
    int64_t held = 0;
    for (int64_t begin = a->start[tree], count; begin < a->start[tree + 1]; begin += count) {
        const int64_t left = a->start[tree + 1] - begin, fresh = held;
        count = left < s->tokens ? left : s->tokens;
        int64_t highest = a->depth[begin];
        for (int64_t i = 0; i < count; i++) {
            push(a, s, head, begin + i, held++, back);
            if (a->depth[begin + i] < highest) highest = a->depth[begin + i];
        }
        int64_t lowest = 0; /* an entry below the block's own lies as high as it is deep */
        if (a->window && highest >= a->window) lowest = highest - a->window + 1;
        if (lowest > fresh) lowest = fresh;
        (back ? attend_back : attend)(a, s, head, begin, count, fresh, held, lowest);
        held = leave(a, s, head, held, fresh, begin + count, back);
    }
}

static void run(Attention *a, int back) {
    const int64_t items = a->trees * a->key_heads;
    int64_t deepest = 0;
    for (int64_t n = 0; n < a->start[a->trees]; n++) deepest = larger(deepest, a->depth[n]);
    Stack s = {.groups = a->heads / a->key_heads, .wide = up(a->size, W)};
    s.tokens = larger(LEAST, QUERIES / s.groups);
    s.rows = s.tokens * s.groups;
    s.room = up(deepest + 1 + s.tokens, W) + PANEL;
    char *memory = NULL;
    for (int64_t i; (i = atomic_fetch_add(&a->next, 1)) < items;) {
        if (!memory) {
            const int64_t bytes = lay(&s, a->size, NULL);
            if (!(memory = calloc(1, bytes + 64))) {
                atomic_store(&a->failed, 1);
                return;
            }
            lay(&s, a->size, (char *)(((uintptr_t)memory + 63) / 64 * 64));
        }
        segment(a, &s, i / a->key_heads, i % a->key_heads, back);
    }
    free(memory);
}

void forward(Attention *a) { run(a, 0); }
void backward(Attention *a) { run(a, 1); }
