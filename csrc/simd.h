// Vectors of the instruction set that this file is compiled for: arithmetic, exp, dtypes.
//
// Products and sums are fused only where `madd` says so (the build switches the compiler's own contraction off), so that
// two places that compute the same give the same bits.
#pragma once

#include <stdint.h>

#include "kernels.h"

#if defined(STATETAP_X86)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#if defined(__AVX512F__)
#define STATETAP_LEVEL avx512
#define STATETAP_VECTOR 64
#elif defined(__AVX2__)
#define STATETAP_LEVEL avx2
#define STATETAP_VECTOR 32
#else
#define STATETAP_LEVEL baseline
#define STATETAP_VECTOR 16
#endif

#define INLINE inline __attribute__((always_inline))

namespace statetap {
namespace STATETAP_LEVEL {

typedef float floats __attribute__((vector_size(STATETAP_VECTOR)));
typedef double doubles __attribute__((vector_size(STATETAP_VECTOR)));
typedef int32_t ints __attribute__((vector_size(STATETAP_VECTOR)));

template <class T>
struct Simd;
template <>
struct Simd<float> {
  using Vector = floats;
};
template <>
struct Simd<double> {
  using Vector = doubles;
};
template <class T>
using Vec = typename Simd<T>::Vector;
template <class T>
constexpr int lanes = STATETAP_VECTOR / sizeof(T);

template <class T>
INLINE Vec<T> load(const T *from) {
  Vec<T> x;
  __builtin_memcpy(&x, from, sizeof x);
  return x;
}

template <class T>
INLINE void store(T *to, Vec<T> x) {
  __builtin_memcpy(to, &x, sizeof x);
}

#if defined(__AVX512F__)
INLINE floats splat(float x) { return (floats)_mm512_set1_ps(x); }
INLINE doubles splat(double x) { return (doubles)_mm512_set1_pd(x); }
INLINE floats madd(floats a, floats b, floats c) { return (floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c); }
INLINE doubles madd(doubles a, doubles b, doubles c) {
  return (doubles)_mm512_fmadd_pd((__m512d)a, (__m512d)b, (__m512d)c);
}
INLINE void stream(float *to, floats x) { _mm512_stream_ps(to, (__m512)x); }
INLINE void stream(double *to, doubles x) { _mm512_stream_pd(to, (__m512d)x); }
#elif defined(__AVX2__)
INLINE floats splat(float x) { return (floats)_mm256_set1_ps(x); }
INLINE doubles splat(double x) { return (doubles)_mm256_set1_pd(x); }
INLINE floats madd(floats a, floats b, floats c) { return (floats)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c); }
INLINE doubles madd(doubles a, doubles b, doubles c) {
  return (doubles)_mm256_fmadd_pd((__m256d)a, (__m256d)b, (__m256d)c);
}
INLINE void stream(float *to, floats x) { _mm256_stream_ps(to, (__m256)x); }
INLINE void stream(double *to, doubles x) { _mm256_stream_pd(to, (__m256d)x); }
#else
INLINE floats splat(float x) { return floats{x, x, x, x}; }
INLINE doubles splat(double x) { return doubles{x, x}; }
#if defined(__aarch64__)
INLINE floats madd(floats a, floats b, floats c) {
  return (floats)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
}
INLINE doubles madd(doubles a, doubles b, doubles c) {
  return (doubles)vfmaq_f64((float64x2_t)c, (float64x2_t)a, (float64x2_t)b);
}
#else
INLINE floats madd(floats a, floats b, floats c) { return a * b + c; }
INLINE doubles madd(doubles a, doubles b, doubles c) { return a * b + c; }
#endif
INLINE void stream(float *to, floats x) { store(to, x); }
INLINE void stream(double *to, doubles x) { store(to, x); }
#endif

template <class T>
INLINE bool streamable(const T *to) {
  return reinterpret_cast<uintptr_t>(to) % STATETAP_VECTOR == 0;
}

// Streamed stores are weakly ordered: before another thread may read them.
INLINE void finish_streams() {
#if defined(STATETAP_X86)
  _mm_sfence();
#endif
}

template <class T>
INLINE T sum(Vec<T> x) {
  T parts[lanes<T>];
  store(parts, x);
#pragma GCC unroll 4
  for (int half = lanes<T> / 2; half; half /= 2)
    for (int i = 0; i < half; ++i) parts[i] += parts[i + half];
  return parts[0];
}

// Subnormal numbers count as zero while this lives: on x86 each costs a hundred cycles, and decays make many.
class NoSubnormals {
 public:
#if defined(STATETAP_X86) && defined(__SSE2__)
  NoSubnormals() : was_(_mm_getcsr()) { _mm_setcsr(was_ | 0x8040); }
  ~NoSubnormals() { _mm_setcsr(was_); }

 private:
  unsigned was_;
#else
  NoSubnormals() {}
#endif
};

// exp to 1.5 units in the last place; 0 and infinity where it leaves the range, nan of nan.
INLINE floats exp(floats x) {
  const floats low = splat(-104.0f), high = splat(89.0f);
  floats in = x < low ? low : x;  // nan compares false and stays
  in = in > high ? high : in;
  const floats rounder = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
  const floats n = madd(in, splat(1.44269504f), rounder) - rounder;
  floats r = madd(n, splat(-0.693145752f), in);
  r = madd(n, splat(-1.42860677e-6f), r);
  floats p = splat(1.98756e-4f);
  p = madd(p, r, splat(1.398199e-3f));
  p = madd(p, r, splat(8.333452e-3f));
  p = madd(p, r, splat(4.166580e-2f));
  p = madd(p, r, splat(1.6666666e-1f));
  p = madd(p, r, splat(0.5f));
  p = madd(p, r * r, r) + splat(1.0f);
  // 2^n in two factors, since n goes from -150 to 129
  const ints whole = __builtin_convertvector(x == x ? n : floats{}, ints), half = whole >> 1;
  const ints first = (half + 127) << 23, second = (whole - half + 127) << 23;
  return p * (floats)first * (floats)second;
}

INLINE void exp_all(float *x, int64_t count) {
  for (int64_t i = 0; i < count; i += lanes<float>) store(x + i, exp(load(x + i)));
}
INLINE void exp_all(double *x, int64_t count) {
  for (int64_t i = 0; i < count; ++i) x[i] = __builtin_exp(x[i]);
}
INLINE float exp_one(float x) { return __builtin_expf(x); }
INLINE double exp_one(double x) { return __builtin_exp(x); }

// -- dtypes --------------------------------------------------------------------------------------

INLINE uint32_t bits(float x) {
  uint32_t n;
  __builtin_memcpy(&n, &x, 4);
  return n;
}
INLINE float from_bits(uint32_t n) {
  float x;
  __builtin_memcpy(&x, &n, 4);
  return x;
}

struct bf16 {
  uint16_t n;
  INLINE operator float() const { return from_bits(uint32_t(n) << 16); }
  static INLINE bf16 of(float x) {  // to nearest, ties to even
    const uint32_t u = bits(x), rounded = (u + 0x7fff + ((u >> 16) & 1)) >> 16;
    return {uint16_t((u & 0x7fffffff) > 0x7f800000 ? (u >> 16) | 0x40 : rounded)};
  }
};

struct f16 {
  uint16_t n;
  INLINE operator float() const {
    const uint32_t sign = uint32_t(n & 0x8000) << 16, rest = n & 0x7fff;
    const float small = float(rest) * 5.9604645e-8f;  // subnormal: a multiple of 2^-24
    uint32_t u = (rest << 13) + (112u << 23);
    u = rest >= 0x7c00 ? u + (112u << 23) : u;
    return from_bits(sign | (rest < 0x400 ? bits(small) : u));
  }
  static INLINE f16 of(float x) {  // to nearest, ties to even
    const uint32_t u = bits(x), sign = (u >> 16) & 0x8000, rest = u & 0x7fffffff;
    const uint32_t small = bits(from_bits(rest) + 0.5f) - bits(0.5f);  // below 2^-14: the sum rounds to 2^-24
    const uint32_t normal = (rest - (112u << 23) + 0xfff + ((rest >> 13) & 1)) >> 13;
    const uint32_t huge = rest > 0x7f800000 ? 0x7e00 : 0x7c00;
    return {uint16_t(sign | (rest >= 0x47800000 ? huge : rest < 0x38800000 ? small : normal))};
  }
};

INLINE float convert(float x, float *) { return x; }
INLINE double convert(float x, double *) { return x; }
INLINE float convert(double x, float *) { return float(x); }
INLINE double convert(double x, double *) { return x; }
INLINE bf16 convert(float x, bf16 *) { return bf16::of(x); }
INLINE f16 convert(float x, f16 *) { return f16::of(x); }
INLINE bf16 convert(double x, bf16 *) { return bf16::of(float(x)); }
INLINE f16 convert(double x, f16 *) { return f16::of(float(x)); }
template <class T>
INLINE T convert(bf16 x, T *) {
  return float(x);
}
template <class T>
INLINE T convert(f16 x, T *) {
  return float(x);
}

template <class From, class To>
INLINE void copy(const From *from, int64_t stride, To *to, int64_t count) {
  if (stride == 1)
    for (int64_t i = 0; i < count; ++i) to[i] = convert(from[i], (To *)nullptr);
  else
    for (int64_t i = 0; i < count; ++i) to[i] = convert(from[i * stride], (To *)nullptr);
}

// `count` numbers from element `at` of an input, `stride` apart, into `to`.
template <class T>
inline void read(const void *data, int64_t dtype, int64_t at, int64_t stride, T *to, int64_t count) {
  switch (dtype) {
    case STATETAP_FLOAT32: return copy((const float *)data + at, stride, to, count);
    case STATETAP_FLOAT64: return copy((const double *)data + at, stride, to, count);
    case STATETAP_BFLOAT16: return copy((const bf16 *)data + at, stride, to, count);
    default: return copy((const f16 *)data + at, stride, to, count);
  }
}

// `count` numbers to element `at` of a result.
template <class T>
inline void write(void *data, int64_t dtype, int64_t at, const T *from, int64_t count) {
  switch (dtype) {
    case STATETAP_FLOAT32: return copy(from, 1, (float *)data + at, count);
    case STATETAP_FLOAT64: return copy(from, 1, (double *)data + at, count);
    case STATETAP_BFLOAT16: return copy(from, 1, (bf16 *)data + at, count);
    default: return copy(from, 1, (f16 *)data + at, count);
  }
}

}  // namespace STATETAP_LEVEL
}  // namespace statetap
