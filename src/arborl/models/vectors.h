/* Vectors of the processor's width, and products of small matrices whose sums stay in registers: what our compiled code is made of.

   Plain C with the vectors of GCC and Clang, for any processor. */

#include <math.h>
#include <stdint.h>

#if defined(__AVX512F__)
#define W 16    /* numbers a vector */
#define ROWS 12 /* tokens whose sums are kept in registers, two vectors wide */
#elif defined(__AVX__)
#define W 8
#define ROWS 6
#else
#define W 4
#define ROWS 8
#endif
#define PANEL (2 * W)
#define EACH(i, n) _Pragma("GCC unroll 16") for (int i = 0; i < n; i++) /* unrolled, or sums are not kept in registers */
#define ALWAYS static inline __attribute__((always_inline))
#define USED_OR_NOT static __attribute__((unused))

typedef float vec __attribute__((vector_size(W * 4), aligned(4), may_alias));
typedef int32_t ivec __attribute__((vector_size(W * 4), aligned(4), may_alias));

USED_OR_NOT int64_t up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }
USED_OR_NOT int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }

/* ---------------------------------------------------------------------------------------------------------------- products */

/* c[m][wide * W] = a[m][depth] b[depth][wide * W], or added to what is there; with `turned`, a lies as a[depth][m]. What lies `next`
   further on in b is asked for meanwhile, where a is not turned. */
ALWAYS void tile(const int m, const int wide, const float *a, int64_t lda, const float *b, int64_t ldb, float *c, int64_t ldc, int64_t depth,
                 int64_t next, const int add, const int turned) {
    vec sum[ROWS][2], right[2];
    EACH(i, m) EACH(j, wide) sum[i][j] = (vec){0};
    for (int64_t d = 0; d < depth; d++) {
        EACH(j, wide) right[j] = *(const vec *)(b + d * ldb + j * W);
        if (!turned) EACH(j, wide) __builtin_prefetch(b + d * ldb + j * W + next);
        EACH(i, m) EACH(j, wide) sum[i][j] += (turned ? a[d * lda + i] : a[i * lda + d]) * right[j];
    }
    EACH(i, m) EACH(j, wide) {
        vec *to = (vec *)(c + i * ldc + j * W);
        *to = add ? *to + sum[i][j] : sum[i][j] + (vec){0};
    }
}

#define TILES(wide, add, turned)                                                                                                                  \
    switch (m) {                                                                                                                          \
        CASE(1, wide, add, turned) CASE(2, wide, add, turned) CASE(3, wide, add, turned) CASE(4, wide, add, turned) CASE(5, wide, add, turned) CASE(6, wide, add, turned) MORE(wide, add, turned) \
    }
#define CASE(n, wide, add, turned) \
    case n: tile(n, wide, a, lda, b, ldb, c, ldc, depth, next, add, turned); break;
#if ROWS == 12
#define MORE(wide, add, turned) CASE(7, wide, add, turned) CASE(8, wide, add, turned) CASE(9, wide, add, turned) CASE(10, wide, add, turned) CASE(11, wide, add, turned) CASE(12, wide, add, turned)
#elif ROWS == 8
#define MORE(wide, add, turned) CASE(7, wide, add, turned) CASE(8, wide, add, turned)
#else
#define MORE(wide, add, turned)
#endif

USED_OR_NOT void set2(int m, const float *a, int64_t lda, const float *b, int64_t ldb, float *c, int64_t ldc, int64_t depth, int64_t next) { TILES(2, 0, 0) }
USED_OR_NOT void add2(int m, const float *a, int64_t lda, const float *b, int64_t ldb, float *c, int64_t ldc, int64_t depth, int64_t next) { TILES(2, 1, 0) }
USED_OR_NOT void set1(int m, const float *a, int64_t lda, const float *b, int64_t ldb, float *c, int64_t ldc, int64_t depth, int64_t next) { TILES(1, 0, 0) }
USED_OR_NOT void add1(int m, const float *a, int64_t lda, const float *b, int64_t ldb, float *c, int64_t ldc, int64_t depth, int64_t next) { TILES(1, 1, 0) }

USED_OR_NOT void turned2(int m, const float *a, int64_t lda, const float *b, int64_t ldb, float *c, int64_t ldc, int64_t depth, int64_t next) { TILES(2, 1, 1) }
USED_OR_NOT void turned1(int m, const float *a, int64_t lda, const float *b, int64_t ldb, float *c, int64_t ldc, int64_t depth, int64_t next) { TILES(1, 1, 1) }

/* ------------------------------------------------------------------------------------------------------------ number by number */

ALWAYS vec at_most(vec x, vec y) { ivec over = x > y; return (vec)((over & (ivec)y) | (~over & (ivec)x)); } /* NaN stays NaN */
ALWAYS vec at_least(vec x, vec y) { ivec below = x < y; return (vec)((below & (ivec)y) | (~below & (ivec)x)); }

/* e^x to about one unit of the last place: 2^n e^r with r within half a ln 2. */
ALWAYS vec exponential(vec x) {
    const float shift = 12582912.0f; /* 1.5 * 2^23: adding it rounds to a whole number */
    x = at_least(at_most(x, (vec){0} + 88.0f), (vec){0} - 87.0f);
    vec whole = x * 1.44269504088896341f + shift;
    const ivec power = ((ivec)whole << 23) + 0x3F800000;
    whole -= shift;
    const vec r = (x - whole * 0.693359375f) + whole * 2.12194440e-4f;
    vec p = r * 1.9875691500e-4f + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    return (p * r * r + r + 1.0f) * (vec)power;
}

ALWAYS float across(vec x) {
    float sum = 0;
    for (int j = 0; j < W; j++) sum += x[j];
    return sum;
}

