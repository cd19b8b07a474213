/* Vectors, and functions of floats that the compiler can vectorise. */
#ifndef NEMOTRON_STEPS_VECTORS_H
#define NEMOTRON_STEPS_VECTORS_H

#include <math.h>
#include <stdint.h>
#include <string.h>

#if defined(__AVX512F__)
enum { LANES = 16 };
#elif defined(__AVX2__)
enum { LANES = 8 };
#else
enum { LANES = 4 };
#endif

typedef float vec __attribute__((vector_size(LANES * 4), aligned(4), may_alias));

#define INLINE static inline __attribute__((always_inline))

/* exp(x) to about one unit in the last place; 0 below -87, no care for infinities above 88. */
INLINE float fast_exp(float x) {
    const float shift = 12582912.0f; /* 1.5 * 2^23: adding it rounds to an integer, found in the lowest bits */
    float low = x < -87.0f ? -87.0f : x;
    float rounded = low * 1.44269504f + shift;
    float n = rounded - shift;
    float r = low - n * 0.693359375f + n * 2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    int32_t bits;
    float power;
    memcpy(&bits, &rounded, 4);
    bits = (int32_t)(((uint32_t)bits + 127u) << 23);
    memcpy(&power, &bits, 4);
    float result = p * power;
    return x < -87.0f ? 0.0f : result;
}

INLINE float sigmoid(float x) { return 1.0f / (1.0f + fast_exp(-x < 87.0f ? -x : 87.0f)); }

#endif
