/* Matrix products of blocks that stay in the cache, and norms. */
#ifndef NEMOTRON_STEPS_PRODUCTS_H
#define NEMOTRON_STEPS_PRODUCTS_H

#include "vectors.h"

enum { PANEL = 32, PARTS = PANEL / LANES, BLOCK = 8, TILE = LANES == 16 ? 8 : 2 };

INLINE int64_t padded(int64_t width) { return (width + PANEL - 1) / PANEL * PANEL; }
INLINE int64_t whole_blocks(int64_t rows) { return (rows + BLOCK - 1) / BLOCK * BLOCK; }

/* A matrix of which element [i, j] lies at data[i * row + j * column]. */
typedef struct {
    const float *data;
    int64_t row, column;
} Strided;

/* A matrix [inner, outputs] read PANEL columns at a time: row k of panel n lies at data[n * between + k * row]. */
typedef struct {
    const float *data;
    int64_t between, row;
} Panels;

INLINE Strided rows_of(const float *data, int64_t stride) { return (Strided){data, stride, 1}; }
INLINE Strided transposed(const float *data, int64_t stride) { return (Strided){data, 1, stride}; }
/* Columns of a row-major matrix; its rows are whole panels. */
INLINE Panels columns_of(const float *data, int64_t stride) { return (Panels){data, PANEL, stride}; }
/* Panels one after the other, [outputs / PANEL, inner, PANEL]. */
INLINE Panels packed(const float *data, int64_t inner) { return (Panels){data, inner * PANEL, PANEL}; }

INLINE void tile(Strided left, const float *panel, int64_t panel_row, int64_t inner, float *out, int64_t out_row,
                 int add) {
    vec sums[TILE][PARTS];
#pragma GCC unroll 8
    for (int r = 0; r < TILE; r++)
#pragma GCC unroll 8
        for (int p = 0; p < PARTS; p++) sums[r][p] = (vec){0};
    for (int64_t k = 0; k < inner; k++) {
        vec right[PARTS];
#pragma GCC unroll 8
        for (int p = 0; p < PARTS; p++) right[p] = *(const vec *)(panel + k * panel_row + p * LANES);
#pragma GCC unroll 8
        for (int r = 0; r < TILE; r++)
#pragma GCC unroll 8
            for (int p = 0; p < PARTS; p++) sums[r][p] += left.data[r * left.row + k * left.column] * right[p];
    }
#pragma GCC unroll 8
    for (int r = 0; r < TILE; r++)
#pragma GCC unroll 8
        for (int p = 0; p < PARTS; p++) {
            vec *into = (vec *)(out + r * out_row + p * LANES);
            if (add) *into += sums[r][p];
            else *into = sums[r][p];
        }
}

/* out[rows, outputs] (+)= left[rows, inner] right[inner, outputs]. Rows are rounded up to whole blocks and outputs to
 * whole panels: left must be readable and out writable there. Every sum runs in the order of `inner`. */
static __attribute__((unused)) void product(Strided left, int64_t rows, int64_t inner, Panels right, int64_t outputs,
                                            float *out, int64_t out_row, int add) {
    for (int64_t n = 0; n * PANEL < outputs; n++)
        for (int64_t r = 0; r < rows; r += TILE) {
            Strided part = {left.data + r * left.row, left.row, left.column};
            tile(part, right.data + n * right.between, right.row, inner, out + r * out_row + n * PANEL, out_row, add);
        }
}

INLINE float dot(const float *a, const float *b, int64_t width) {
    float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < width; i++) sum += a[i] * b[i];
    return sum;
}

INLINE float inverse_rms(const float *states, int64_t width, float eps) {
    return 1.0f / sqrtf(dot(states, states, width) / (float)width + eps);
}

#endif
