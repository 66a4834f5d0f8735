// A block of tokens meets the state. With S0 the state before the block, and decays folded into the rows (chunk.h):
//
//     m_i = erase_i^T S0 + sum_{j<i} kk_ij u_j     what the key finds there      (substitution, a token after the other)
//     u_i = beta_i (v_i - m_i)                     what the token writes
//     o_i = see_i^T S0 + sum_{j<=i} qk_ij u_j      what the query reads
//     S1  = total o S0 + sum_j put_j u_j^T         the state after the block
//
// Three multiply-adds for each element of the state and each token, as in the loop over tokens, and S0 is loaded three
// times and stored once for eight tokens.
#pragma once

#include "chunk.h"

namespace statetap {
namespace STATETAP_LEVEL {

// Rows that meet the state at once: as many as there are registers for.
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int GROUP = 8;
#else
constexpr int GROUP = 4;
#endif

template <class T, int R, int N>
INLINE void products(const T *rows, const T *state, int64_t pitch, int64_t key_dim, Vec<T> (&found)[R][N]) {
  for (int64_t k = 0; k < key_dim; ++k, state += pitch) {
    Vec<T> s[N];
#pragma GCC unroll 16
    for (int n = 0; n < N; ++n) s[n] = load(state + n * lanes<T>);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const Vec<T> x = splat(rows[r * PITCH + k]);
#pragma GCC unroll 16
      for (int n = 0; n < N; ++n) found[r][n] = madd(x, s[n], found[r][n]);
    }
  }
}

// found[r] = rows[r]^T state for R rows of a block.
template <class T, int R, int N>
INLINE void read_state(const T *rows, const T *state, int64_t pitch, int64_t key_dim, Vec<T> (&found)[R][N]) {
  constexpr int G = R < GROUP ? R : GROUP;
#pragma GCC unroll 8
  for (int r = 0; r < R; r += G) {
    Vec<T> part[G][N] = {};
    products<T, G, N>(rows + r * PITCH, state, pitch, key_dim, part);
#pragma GCC unroll 8
    for (int i = 0; i < G; ++i)
#pragma GCC unroll 16
      for (int n = 0; n < N; ++n) found[r + i][n] = part[i][n];
  }
}

// to = total o from + sum_r put_r u_r^T; a group of rows after the other.
template <class T, int R, int N>
INLINE void write_state(const T *put, const T *total, const T *u, int64_t width, const T *from, int64_t from_pitch, T *to,
                        int64_t to_pitch, int64_t key_dim) {
  constexpr int G = R < GROUP ? R : GROUP;
#pragma GCC unroll 8
  for (int r = 0; r < R; r += G) {
    Vec<T> writes[G][N];
#pragma GCC unroll 8
    for (int i = 0; i < G; ++i)
#pragma GCC unroll 16
      for (int n = 0; n < N; ++n) writes[i][n] = load(u + (r + i) * width + n * lanes<T>);
    for (int64_t k = 0; k < key_dim; ++k) {
      Vec<T> s[N];
      const Vec<T> left = splat(total[k]);
#pragma GCC unroll 16
      for (int n = 0; n < N; ++n)
        s[n] = r == 0 ? left * load(from + k * from_pitch + n * lanes<T>) : load(to + k * to_pitch + n * lanes<T>);
#pragma GCC unroll 8
      for (int i = 0; i < G; ++i) {
        const Vec<T> x = splat(put[(r + i) * PITCH + k]);
#pragma GCC unroll 16
        for (int n = 0; n < N; ++n) s[n] = madd(x, writes[i][n], s[n]);
      }
#pragma GCC unroll 16
      for (int n = 0; n < N; ++n) store(to + k * to_pitch + n * lanes<T>, s[n]);
    }
  }
}

// N vectors of value columns from `column` on of R tokens from `first` on, of which `count` are there.
template <class T, int R, int N>
inline __attribute__((noinline)) void run_block(const statetap_delta &c, Scratch<T> &s, int64_t first, int64_t count, int64_t column,
                                                const T *from, int64_t from_pitch, T *to, int64_t to_pitch) {
  const int64_t K = c.key_dim, at = first * PITCH, cell = first * s.width + column;
  const T *kk = s.kk + first * BLOCK, *qk = s.qk + first * BLOCK, *v = s.v + cell;
  T *u = s.u + cell;
  Vec<T> x[R][N];
  if (c.replay) {
    for (int i = 0; i < R; ++i)
      for (int n = 0; n < N; ++n) store(u + i * s.width + n * lanes<T>, load(v + i * s.width + n * lanes<T>));
  } else {
    read_state<T, R, N>(s.erase + at, from, from_pitch, K, x);
#pragma GCC unroll 8
    for (int i = 0; i < R; ++i) {
      const Vec<T> beta = splat(s.beta[first + i]);
#pragma GCC unroll 16
      for (int n = 0; n < N; ++n) {
        Vec<T> m = x[i][n];
#pragma GCC unroll 8
        for (int j = 0; j < i; ++j) m = madd(splat(kk[i * BLOCK + j]), x[j][n], m);
        const Vec<T> write = i < count ? beta * (load(v + i * s.width + n * lanes<T>) - m) : Vec<T>{};
        x[i][n] = write;
        store(u + i * s.width + n * lanes<T>, write);
        if (c.norms) store(s.m + cell + i * s.width + n * lanes<T>, m);
      }
    }
  }
  if (c.outputs) {
    Vec<T> o[R][N];
    read_state<T, R, N>(s.see + at, from, from_pitch, K, o);
#pragma GCC unroll 8
    for (int i = 0; i < R; ++i)
#pragma GCC unroll 16
      for (int n = 0; n < N; ++n) {
#pragma GCC unroll 8
        for (int j = 0; j <= i; ++j)
          o[i][n] = madd(splat(qk[i * BLOCK + j]), load(u + j * s.width + n * lanes<T>), o[i][n]);
        store(s.o + cell + i * s.width + n * lanes<T>, o[i][n]);
      }
  }
  write_state<T, R, N>(s.put + at, s.total + first / BLOCK * PITCH, u, s.width, from, from_pitch, to, to_pitch, K);
}

// The chunk's tokens through the whole state, a tile of it after the other. Meanwhile the rows that are read next, far apart
// in memory, come into the cache.
template <class T>
inline void run_chunk(const statetap_delta &c, Scratch<T> &s, int64_t length, const Item &next_item, const statetap_chunk *next) {
  const int64_t steps = s.width / COLUMNS<T> * ((length + BLOCK - 1) / BLOCK);
  int64_t step = 0;
  for (int64_t column = 0; column < s.width; column += COLUMNS<T>) {
    T *tile = s.state + column * c.key_dim;
    for (int64_t first = 0; first < length; first += BLOCK, ++step) {
      if (next) fetch_rows(c, next_item, *next, next->length * step / steps, next->length * (step + 1) / steps);
      run_block<T, BLOCK, TILE>(c, s, first, least(BLOCK, length - first), column, tile, COLUMNS<T>, tile, COLUMNS<T>);
    }
  }
}

}  // namespace STATETAP_LEVEL
}  // namespace statetap
