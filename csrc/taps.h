// Side outputs of a chunk, from its entering state (`rows`), its keys, decays and updates. The outputs have been computed
// without them, so looking changes nothing.
#pragma once

#include "block.h"

namespace statetap {
namespace STATETAP_LEVEL {

constexpr int WIDE = GROUP;  // vectors of value columns that a walk over tokens holds in registers

// -- where things go: -1 for what is not wanted --------------------------------------------------

INLINE int64_t head_slot(const statetap_delta &c, int64_t head) { return c.head_slots ? c.head_slots[head] : head; }

// Element of `states` where the state after a token begins.
INLINE int64_t state_place(const statetap_delta &c, int64_t row, int64_t token, int64_t head) {
  if (!c.states) return -1;
  const int64_t number = row * c.tokens + token, slot = c.state_slots ? c.state_slots[number] : number, h = head_slot(c, head);
  return slot < 0 || h < 0 ? -1 : (slot * c.kept + h) * c.key_dim * c.value_dim;
}

INLINE int64_t place(const statetap_delta &c, int64_t row, int64_t token, int64_t head) {
  const int64_t h = head_slot(c, head);
  return h < 0 ? -1 : (row * c.tokens + token) * c.kept + h;
}

// -- whole states --------------------------------------------------------------------------------

template <class T>
inline void tiles_to_rows(const statetap_delta &c, Scratch<T> &s) {
  for (int64_t column = 0; column < s.width; column += COLUMNS<T>)
    for (int64_t k = 0; k < c.key_dim; ++k)
      __builtin_memcpy(s.rows + k * s.width + column, s.state + column * c.key_dim + k * COLUMNS<T>, COLUMNS<T> * sizeof(T));
}

template <class T>
inline void rows_to_tiles(const statetap_delta &c, Scratch<T> &s) {
  for (int64_t column = 0; column < s.width; column += COLUMNS<T>)
    for (int64_t k = 0; k < c.key_dim; ++k)
      __builtin_memcpy(s.state + column * c.key_dim + k * COLUMNS<T>, s.rows + k * s.width + column, COLUMNS<T> * sizeof(T));
}

// `rows` to element `at` of a result.
template <class T>
inline void write_rows(const statetap_delta &c, const Item &item, const Scratch<T> &s, void *data, int64_t dtype, int64_t at) {
  for (int64_t k = 0; k < c.key_dim; ++k)
    write(data, dtype, at + k * c.value_dim + item.begin, s.rows + k * s.width, item.columns());
}

// -- states and norms of every token -------------------------------------------------------------

template <class T>
struct Walk {
  const statetap_delta &c;
  const Item &item;
  Scratch<T> &s;
  int64_t first, count;  // the block's tokens
  int64_t at[BLOCK];     // where their states go
  bool direct;           // as they are, in streamed stores
  double *squares;       // or null

  template <int N>
  void columns(int64_t column) {
    Vec<T> square[BLOCK] = {};
    const T *u = s.u + first * s.width + column;
    const T *put = s.put + first * PITCH, *total = s.total + first / BLOCK * PITCH;
    for (int64_t k = 0; k < c.key_dim; ++k) {
      T *row = s.rows + k * s.width + column;
      Vec<T> now[N], last[N];
#pragma GCC unroll 8
      for (int n = 0; n < N; ++n) now[n] = load(row + n * lanes<T>), last[n] = splat(total[k]) * now[n];
      // what the block hands on, as `write_state` computes it
      for (int j = 0; j < BLOCK; ++j) {
        const Vec<T> x = splat(put[j * PITCH + k]);
#pragma GCC unroll 8
        for (int n = 0; n < N; ++n) last[n] = madd(x, load(u + j * s.width + n * lanes<T>), last[n]);
      }
      for (int i = 0; i + 1 < count; ++i) {
        const Vec<T> x = splat(s.k[(first + i) * PITCH + k]);
        const Vec<T> left = splat(c.per_channel ? s.decay[(first + i) * PITCH + k] : s.decay[first + i]);
#pragma GCC unroll 8
        for (int n = 0; n < N; ++n) now[n] = madd(x, load(u + i * s.width + n * lanes<T>), left * now[n]);
        give<N>(i, k, column, now, square[i]);
      }
      give<N>(count - 1, k, column, last, square[count - 1]);
#pragma GCC unroll 8
      for (int n = 0; n < N; ++n) store(row + n * lanes<T>, last[n]);
    }
    if (squares)
      for (int i = 0; i < count; ++i) squares[first + i] += sum<T>(square[i]);
  }

  template <int N>
  INLINE void give(int i, int64_t k, int64_t column, const Vec<T> (&x)[N], Vec<T> &square) {
    if (squares)
#pragma GCC unroll 8
      for (int n = 0; n < N; ++n) square = madd(x[n], x[n], square);
    if (at[i] < 0) return;
    const int64_t to = at[i] + k * c.value_dim + item.begin + column;
    if (direct) {
#pragma GCC unroll 8
      for (int n = 0; n < N; ++n) stream((T *)c.states + to + n * lanes<T>, x[n]);
    } else {
      T row[N * lanes<T>];
#pragma GCC unroll 8
      for (int n = 0; n < N; ++n) store(row + n * lanes<T>, x[n]);
      write(c.states, c.state_dtype, to, row, least(N * lanes<T>, item.columns() - column));
    }
  }
};

// The states after the chunk's tokens, from `rows`, which is walked along. `squares`: of every state, unless it is null.
template <class T>
inline void walk(const statetap_delta &c, const Item &item, const statetap_chunk &chunk, Scratch<T> &s, double *squares) {
  int64_t last = squares ? chunk.length - 1 : -1;
  for (int64_t i = 0; i < chunk.length; ++i)
    if (state_place(c, chunk.row, chunk.start + i, item.head) >= 0) last = i > last ? i : last;
  const bool direct = c.state_dtype == c.computed && item.columns() % lanes<T> == 0 && c.value_dim % lanes<T> == 0 &&
                      item.begin % lanes<T> == 0 && streamable((T *)c.states);
  const int64_t columns = round_up(item.columns(), lanes<T>);
  for (int64_t first = 0; first <= last; first += BLOCK) {
    Walk<T> of{c, item, s, first, least(BLOCK, chunk.length - first), {}, direct, squares};
    for (int64_t i = 0; i < of.count; ++i) of.at[i] = state_place(c, chunk.row, chunk.start + first + i, item.head);
    int64_t column = 0;
    for (; column + WIDE * lanes<T> <= columns; column += WIDE * lanes<T>) of.template columns<WIDE>(column);
    for (; column < columns; column += lanes<T>) of.template columns<1>(column);
  }
  if (direct) finish_streams();
}

template <class T>
inline double square_of(const T *x, int64_t count) {
  double found = 0;
  for (int64_t i = 0; i < count; i += COLUMNS<T>) found += double(dot(x + i, x + i, COLUMNS<T>));
  return found;
}

// |S_t|^2 = a^2 |S_{t-1}|^2 + 2 m_t . u_t + |k_t|^2 |u_t|^2 for a decay per head, where m_t = a S_{t-1}^T k_t is what the
// key found. Where a write erases the state the terms cancel: false if the error may then exceed a 10^4-th of the square.
template <class T>
inline bool squares_without_states(const statetap_delta &c, const statetap_chunk &chunk, const Scratch<T> &s, double *squares) {
  const double unit = sizeof(T) == 4 ? 1.2e-7 : 2.3e-16;
  double square = s.square, error = unit * square;
  for (int64_t i = 0; i < chunk.length; ++i) {
    const double a = s.decay[i], key = dot(s.k + i * PITCH, s.k + i * PITCH, round_up(c.key_dim, lanes<T>));
    double mu = 0, uu = 0;
    for (int64_t x = 0; x < s.width; x += COLUMNS<T>) {
      const T *m = s.m + i * s.width + x, *u = s.u + i * s.width + x;
      mu += double(dot(m, u, COLUMNS<T>)), uu += double(dot(u, u, COLUMNS<T>));
    }
    const double kept = a * a * square;
    error = a * a * error + 4 * unit * (kept + key * uu + 2 * __builtin_sqrt(key * kept * uu));
    square = kept + 2 * mu + key * uu;
    if (!(error <= 1e-4 * square) && error != 0) return false;
    squares[i] = square;
  }
  return true;
}

template <class T>
inline void write_norm(const statetap_delta &c, int64_t at, double square) {
  const T norm = T(__builtin_sqrt(square));
  if (at >= 0) write(c.norms, c.computed, at, &norm, 1);
}

// -- probes --------------------------------------------------------------------------------------

template <class T>
inline void read_probes(const statetap_delta &c, int64_t row, int64_t token, int64_t head, Scratch<T> &s) {
  const int64_t *stride = c.probes.stride, padded = round_up(c.key_dim, lanes<T>);
  for (int64_t p = 0; p < round_up(c.probe_count, 4); ++p) {
    T *to = s.probe + p * PITCH;
    zero(to, padded);
    if (p < c.probe_count)
      read(c.probes.data, c.probes.dtype, row * stride[0] + token * stride[1] + head * stride[2] + p * stride[3], stride[4], to,
           c.key_dim);
  }
}

// found = probes^T rows.
template <class T>
inline void read_by_probes(const statetap_delta &c, Scratch<T> &s, const T *rows) {
  for (int64_t p = 0; p < c.probe_count; p += 4)
    for (int64_t column = 0; column < s.width; column += COLUMNS<T>) {
      Vec<T> found[4][TILE] = {};
      products<T, 4, TILE>(s.probe + p * PITCH, rows + column, s.width, c.key_dim, found);
      for (int r = 0; r < 4; ++r)
        for (int n = 0; n < TILE; ++n) store(s.found + (p + r) * s.width + column + n * lanes<T>, found[r][n]);
    }
}

template <class T>
inline void write_reads(const statetap_delta &c, const Item &item, const Scratch<T> &s, int64_t at) {
  for (int64_t p = 0; p < c.probe_count; ++p)
    write(c.reads, c.output_dtype, (at * c.probe_count + p) * c.value_dim + item.begin, s.found + p * s.width, item.columns());
}

// r_t = a r_{t-1} + (p . k_t) u_t: probes that stay the same, and a decay per head, need the chunk's entering state alone.
template <class T>
inline void reads_by_fixed_probes(const statetap_delta &c, const Item &item, const statetap_chunk &chunk, Scratch<T> &s) {
  const int64_t padded = round_up(c.key_dim, lanes<T>);
  read_probes(c, chunk.row, chunk.start, item.head, s);
  read_by_probes(c, s, s.rows);
  for (int64_t i = 0; i < chunk.length; ++i) {
    const Vec<T> left = splat(s.decay[i]);
    for (int64_t p = 0; p < c.probe_count; ++p) {
      const Vec<T> pk = splat(dot(s.probe + p * PITCH, s.k + i * PITCH, padded));
      T *r = s.found + p * s.width;
      for (int64_t x = 0; x < s.width; x += lanes<T>)
        store(r + x, madd(pk, load(s.u + i * s.width + x), left * load(r + x)));
    }
    write_reads(c, item, s, place(c, chunk.row, chunk.start + i, item.head));
  }
}

// Any probes and decays: the state after each token, and its reads.
template <class T>
inline void reads_by_any_probes(const statetap_delta &c, const Item &item, const statetap_chunk &chunk, Scratch<T> &s) {
  __builtin_memcpy(s.walked, s.rows, c.key_dim * s.width * sizeof(T));
  for (int64_t i = 0; i < chunk.length; ++i) {
    for (int64_t k = 0; k < c.key_dim; ++k) {
      const Vec<T> left = splat(c.per_channel ? s.decay[i * PITCH + k] : s.decay[i]), key = splat(s.k[i * PITCH + k]);
      T *row = s.walked + k * s.width;
      for (int64_t x = 0; x < s.width; x += lanes<T>)
        store(row + x, madd(key, load(s.u + i * s.width + x), left * load(row + x)));
    }
    read_probes(c, chunk.row, chunk.start + i, item.head, s);
    read_by_probes(c, s, s.walked);
    write_reads(c, item, s, place(c, chunk.row, chunk.start + i, item.head));
  }
}

// -- all of a chunk's ----------------------------------------------------------------------------

// From the entering state in `rows`, which is walked along.
template <class T>
inline void give_taps(const statetap_delta &c, const Item &item, const statetap_chunk &chunk, Scratch<T> &s) {
  if (head_slot(c, item.head) < 0) return;
  const bool fixed = c.probes.stride[0] == 0 && c.probes.stride[1] == 0 && !c.per_channel;
  if (c.reads) fixed ? reads_by_fixed_probes(c, item, chunk, s) : reads_by_any_probes(c, item, chunk, s);
  double squares[CHUNK] = {};
  const bool known = c.norms && !c.replay && !c.per_channel && squares_without_states(c, chunk, s, squares);
  if (c.norms && !known) __builtin_memset(squares, 0, sizeof squares);
  if (c.states || (c.norms && !known)) walk(c, item, chunk, s, c.norms && !known ? squares : nullptr);
  for (int64_t i = 0; c.norms && i < chunk.length; ++i)
    write_norm<T>(c, place(c, chunk.row, chunk.start + i, item.head), squares[i]);
}

// The token before a written state reads that one: its output, its state, its norm and its reads, from `rows`. In a replay
// any chunk's entering state is the state of the token before, bit for bit, and only a written one is read.
template <class T>
inline void give_entering(const statetap_delta &c, const Item &item, int64_t row, int64_t token, Scratch<T> &s, bool written) {
  if (c.outputs && written) {
    const int64_t key_head = item.head / (c.heads / c.key_heads);
    read_key(c, c.q, row, token, key_head, T(c.scale), s.q);
    for (int64_t column = 0; column < s.width; column += COLUMNS<T>) {
      Vec<T> found[1][TILE] = {};
      products<T, 1, TILE>(s.q, s.rows + column, s.width, c.key_dim, found);
      for (int n = 0; n < TILE; ++n) store(s.o + column + n * lanes<T>, found[0][n]);
    }
    write(c.outputs, c.output_dtype, ((row * c.tokens + token) * c.heads + item.head) * c.value_dim + item.begin, s.o, item.columns());
  }
  const int64_t at = state_place(c, row, token, item.head), slot = place(c, row, token, item.head);
  if (at >= 0) write_rows(c, item, s, c.states, c.state_dtype, at);
  if (c.norms && slot >= 0) write_norm<T>(c, slot, square_of(s.rows, c.key_dim * s.width));
  if (c.reads && slot >= 0) {
    read_probes(c, row, token, item.head, s);
    read_by_probes(c, s, s.rows);
    write_reads(c, item, s, slot);
  }
}

}  // namespace STATETAP_LEVEL
}  // namespace statetap
