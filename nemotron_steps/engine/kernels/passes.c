/* Elementwise passes of a transformer layer over [rows, width], each reading and writing memory once: RMSNorm without
 * weight, and SwiGLU, with their gradients. */
#include "products.h"

/* unit = states / rms(states), scale = 1 / rms(states) */
void norm_forward(const float *states, float *unit, float *scale, int64_t rows, int64_t width, float eps,
                  int64_t threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t r = 0; r < rows; r++) {
        const float *in = states + r * width;
        float *out = unit + r * width, inverse = inverse_rms(in, width, eps);
        scale[r] = inverse;
#pragma omp simd
        for (int64_t i = 0; i < width; i++) out[i] = in[i] * inverse;
    }
}

/* grad (of unit, overwritten) → gradient of states, with `plus` added */
void norm_backward(float *grad, const float *unit, const float *scale, const float *plus, int64_t rows, int64_t width,
                   int64_t threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t r = 0; r < rows; r++) {
        float *into = grad + r * width;
        const float *mine = unit + r * width, *add = plus + r * width;
        float along = dot(into, mine, width) / (float)width, inverse = scale[r];
#pragma omp simd
        for (int64_t i = 0; i < width; i++) into[i] = (into[i] - mine[i] * along) * inverse + add[i];
    }
}

/* out [rows, width] = silu(gate) · up, of gate_up [rows, 2 · width] */
void swiglu_forward(const float *gate_up, float *out, int64_t rows, int64_t width, int64_t threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t r = 0; r < rows; r++) {
        const float *gate = gate_up + r * 2 * width, *up = gate + width;
        float *into = out + r * width;
#pragma omp simd
        for (int64_t i = 0; i < width; i++) into[i] = gate[i] * sigmoid(gate[i]) * up[i];
    }
}

/* grad [rows, width] → grad_gate_up [rows, 2 · width] */
void swiglu_backward(const float *gate_up, const float *grad, float *grad_gate_up, int64_t rows, int64_t width,
                     int64_t threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t r = 0; r < rows; r++) {
        const float *gate = gate_up + r * 2 * width, *up = gate + width, *from = grad + r * width;
        float *to_gate = grad_gate_up + r * 2 * width, *to_up = to_gate + width;
#pragma omp simd
        for (int64_t i = 0; i < width; i++) {
            float open = sigmoid(gate[i]), silu = gate[i] * open;
            to_up[i] = from[i] * silu;
            to_gate[i] = from[i] * up[i] * (open + silu * (1.0f - open));
        }
    }
}
