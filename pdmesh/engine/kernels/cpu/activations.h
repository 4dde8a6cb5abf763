// Activations of MLPs, lane by lane, and where a product's emitted tiles go (gemm.h). ask(row, panel): two panels of this row will be
// emitted soon.
#pragma once

#include "abi.h"
#include "gemm.h"

namespace pdmesh {

inline F f_exp(F x) { return f_exp2(x * f_set(1.44269504f)); }

// 1 / (1 + e^-x)
inline F sigmoid(F x) { return f_reciprocal(f_set(1.0f) + f_exp2(f_min(x * f_set(-1.44269504f), f_set(126.0f)))); }

inline F silu(F x) { return x * sigmoid(x); }

inline F f_tanh(F x) {
    return f_set(1.0f) - f_set(2.0f) / (f_set(1.0f) + f_exp2(f_min(x * f_set(2.88539008f), f_set(126.0f))));
}

// x times the normal distribution's share below it; erf within 1.5e-7 (Abramowitz and Stegun, 1964, 7.1.26).
inline F gelu(F x) {
    const F z = f_abs(x) * f_set(0.70710678f), t = f_set(1.0f) / f_fma(f_set(0.3275911f), z, f_set(1.0f));
    F p = f_set(1.061405429f);
    p = f_fma(p, t, f_set(-1.453152027f));
    p = f_fma(p, t, f_set(1.421413741f));
    p = f_fma(p, t, f_set(-0.284496736f));
    p = f_fma(p, t, f_set(0.254829592f));
    const F share = p * t * f_exp2(z * z * f_set(-1.44269504f));  // 1 - erf(z)
    return f_max(x, f_zero()) - f_set(0.5f) * f_abs(x) * share;
}

// x / 2 * (1 + tanh(u)) is x / (1 + e^-2u).
inline F gelu_tanh(F x) {
    const F u = f_set(0.79788456f) * (x + f_set(0.044715f) * x * x * x);
    return x * sigmoid(u + u);
}

inline F activate(int kind, F x) {
    switch (kind) {
        case kGelu: return gelu(x);
        case kGeluTanh: return gelu_tanh(x);
        case kRelu: return f_max(x, f_zero());
        case kSquaredRelu: return f_max(x, f_zero()) * f_max(x, f_zero());
        default: return silu(x);
    }
}

// Lines that will be written.
[[gnu::always_inline]] inline void ask_to_write(float* p, int lines) {
    for (int i = 0; i < lines; i++) __builtin_prefetch(p + i * kPanel, 1);
}

struct Emitted {  // [rows][stride] = product
    static constexpr bool kPairs = false;
    float* out;
    size_t stride;
    int width;
    void ask(int row, int panel) const { ask_to_write(out + row * stride + panel * kPanel, 2); }
    template <int NR>
    [[gnu::always_inline]] void operator()(int row, int panel, const F (&x)[NR]) const {
        float* p = out + row * stride + panel * kPanel;
#pragma GCC unroll 8
        for (int j = 0; j < NR; j++) f_store_first(p + j * kPanel, x[j], width - (panel + j) * kPanel);
    }
};
struct Added {  // [rows][stride] += product; rows are padded to whole panels
    static constexpr bool kPairs = false;
    float* out;
    size_t stride;
    void ask(int row, int panel) const { ask_to_write(out + row * stride + panel * kPanel, 2); }
    template <int NR>
    [[gnu::always_inline]] void operator()(int row, int panel, const F (&x)[NR]) const {
        float* p = out + row * stride + panel * kPanel;
#pragma GCC unroll 8
        for (int j = 0; j < NR; j++) f_store(p + j * kPanel, f_load(p + j * kPanel) + x[j]);
    }
};
struct AddedScaled {  // [rows][stride] = itself + factor * beside (or null) + factor * product
    static constexpr bool kPairs = false;
    float* out;
    const float* beside;
    size_t stride;
    float factor;
    void ask(int row, int panel) const { ask_to_write(out + row * stride + panel * kPanel, 2); }
    template <int NR>
    [[gnu::always_inline]] void operator()(int row, int panel, const F (&x)[NR]) const {
        const size_t at = row * stride + panel * kPanel;
#pragma GCC unroll 8
        for (int j = 0; j < NR; j++) {
            F sum = f_load(out + at + j * kPanel);
            if (beside) sum = sum + f_load(beside + at + j * kPanel) * f_set(factor);
            f_store(out + at + j * kPanel, sum + x[j] * f_set(factor));
        }
    }
};
struct Gated {  // [rows][stride] = silu(gate) * up of alternating panels
    static constexpr bool kPairs = true;
    float* out;
    size_t stride;
    void ask(int row, int panel) const { ask_to_write(out + row * stride + panel / 2 * kPanel, 1); }
    template <int NR>
    [[gnu::always_inline]] void operator()(int row, int panel, const F (&x)[NR]) const {
        float* p = out + row * stride + panel / 2 * kPanel;
        if constexpr (NR >= 2) f_store(p, silu(x[0]) * x[1]);
        if constexpr (NR >= 4) f_store(p + kPanel, silu(x[2]) * x[3]);
    }
};
struct GatedBy {  // the same with another activation
    static constexpr bool kPairs = true;
    float* out;
    size_t stride;
    int activation;
    float limit;  // of kClampedSwish
    [[gnu::noinline]] void emit(float* p, const F& gate, const F& up) const {
        if (activation != kClampedSwish) return f_store(p, activate(activation, gate) * up);
        const F cut = f_min(gate, f_set(limit)), linear = f_max(f_min(up, f_set(limit)), f_set(-limit));
        f_store(p, (linear + f_set(1.0f)) * (cut * sigmoid(cut * f_set(1.702f))));
    }
    void ask(int row, int panel) const { ask_to_write(out + row * stride + panel / 2 * kPanel, 1); }
    template <int NR>
    [[gnu::always_inline]] void operator()(int row, int panel, const F (&x)[NR]) const {
        float* p = out + row * stride + panel / 2 * kPanel;
        if constexpr (NR >= 2) emit(p, x[0], x[1]);
        if constexpr (NR >= 4) emit(p + kPanel, x[2], x[3]);
    }
};
struct Activated {  // [rows][stride] = activation of the product; rows are padded to whole panels
    static constexpr bool kPairs = false;
    float* out;
    size_t stride;
    int activation;
    [[gnu::noinline]] void emit(float* p, const F& x) const { f_store(p, activate(activation, x)); }
    void ask(int row, int panel) const { ask_to_write(out + row * stride + panel * kPanel, 2); }
    template <int NR>
    [[gnu::always_inline]] void operator()(int row, int panel, const F (&x)[NR]) const {
        float* p = out + row * stride + panel * kPanel;
#pragma GCC unroll 8
        for (int j = 0; j < NR; j++) emit(p + j * kPanel, x[j]);
    }
};

}  // namespace pdmesh
