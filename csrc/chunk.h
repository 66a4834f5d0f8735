// A chunk of one head: what is read of the call, brought into the form that the products of block.h work on.
#pragma once

#include <new>

#include "simd.h"

namespace statetap {
namespace STATETAP_LEVEL {

constexpr int CHUNK = 64;           // tokens that are prepared together; a trajectory has a state for each
constexpr int BLOCK = 8;            // tokens that meet the state together
constexpr int BLOCKS = CHUNK / BLOCK;
constexpr int MAX_KEY_DIM = 256;
constexpr int PITCH = MAX_KEY_DIM + 16;  // of rows over key channels; off the powers of two, so that rows share no cache set
constexpr int TILE = 2;             // vectors of value columns that a block's products hold in registers
constexpr int FETCH = 2;            // where rows that are read soon are asked into: the second cache

template <class T>
constexpr int COLUMNS = TILE * lanes<T>;

INLINE int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }
INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

// What is worked on: the columns from `begin` to `end` of one head's state, in one sequence.
struct Item {
  int64_t sequence, head, begin, end;
  int64_t columns() const { return end - begin; }
  bool first() const { return begin == 0; }  // what has no value columns is written by the first piece
};

// Memory of one thread. Rows of key channels are PITCH long, rows of value columns `width`.
template <class T>
struct Scratch {
  T *k, *q;                // [CHUNK, K] keys and queries as the rule uses them
  T *erase, *see, *put;    // [CHUNK, K] pre o k, pre o q, suf o k: decays of a block folded in
  T *decay;                // [CHUNK, K] or [CHUNK]
  T *total;                // [BLOCKS, K] the decay over a block
  T *kk, *qk;              // [BLOCKS, BLOCK, BLOCK] products of rows with earlier keys, decays between them folded in
  T *beta;                 // [CHUNK]
  T *v, *u, *m, *o;        // [CHUNK, width] values, updates, what the key found before its write, outputs
  T *states, *state;       // [heads, width / COLUMNS, K, COLUMNS] tiles; those of the head that is worked on
  T *rows, *walked;        // [K, width] the state as it is stored; one that is taken from token to token
  T *probe, *found;        // [P, K], [P, width]
  int64_t width;
  double square;           // |entering state|^2
};

class Buffer {
 public:
  ~Buffer() { ::operator delete(data_, std::align_val_t(64)); }
  char *of(size_t bytes) {
    if (bytes > bytes_) {
      ::operator delete(data_, std::align_val_t(64));
      data_ = nullptr, bytes_ = 0;
      data_ = (char *)::operator new(bytes, std::align_val_t(64), std::nothrow);
      if (data_) bytes_ = bytes;
    }
    return data_;
  }

 private:
  char *data_ = nullptr;
  size_t bytes_ = 0;
};

// False if there is not enough memory.
template <class T>
inline bool allocate(const statetap_delta &c, int64_t heads, int64_t columns, Scratch<T> &s) {
  static thread_local Buffer buffer;
  s.width = round_up(columns, COLUMNS<T>);
  const int64_t probes = round_up(c.probe_count, 4), keys = CHUNK * PITCH, values = CHUNK * s.width;
  struct {
    T **place;
    int64_t count;
  } parts[] = {{&s.k, keys},           {&s.q, keys},
               {&s.erase, keys},       {&s.see, keys},
               {&s.put, keys},         {&s.decay, keys},
               {&s.total, BLOCKS * PITCH},
               {&s.kk, CHUNK * BLOCK}, {&s.qk, CHUNK * BLOCK},
               {&s.beta, CHUNK},       {&s.v, values},
               {&s.u, values},         {&s.m, values},
               {&s.o, values},         {&s.states, heads * c.key_dim * s.width},
               {&s.rows, c.key_dim * s.width},
               {&s.walked, c.reads ? c.key_dim * s.width : 0},
               {&s.probe, probes * PITCH},
               {&s.found, probes * s.width}};
  int64_t total = 0;
  for (auto &part : parts) total += round_up(part.count, 64);
  T *at = (T *)buffer.of(total * sizeof(T));
  if (!at) return false;
  for (auto &part : parts) *part.place = at, at += round_up(part.count, 64);
  return true;
}

// -- reading the call ----------------------------------------------------------------------------

template <class T>
inline void read_row(const statetap_input &x, int64_t b, int64_t t, int64_t h, T *to, int64_t count, int64_t from = 0) {
  read(x.data, x.dtype, b * x.stride[0] + t * x.stride[1] + h * x.stride[2] + from * x.stride[3], x.stride[3], to, count);
}

template <class T>
inline T read_one(const statetap_input &x, int64_t b, int64_t t, int64_t h, T otherwise) {
  if (x.data) read(x.data, x.dtype, b * x.stride[0] + t * x.stride[1] + h * x.stride[2], 1, &otherwise, 1);
  return otherwise;
}

template <class T>
INLINE void zero(T *x, int64_t count) {
  __builtin_memset(x, 0, count * sizeof(T));
}

template <class T>
INLINE void scale(T *x, T by, int64_t count) {
  for (int64_t i = 0; i < count; i += lanes<T>) store(x + i, load(x + i) * splat(by));
}

template <class T>
INLINE T dot(const T *x, const T *y, int64_t count) {
  Vec<T> found = {};
  for (int64_t i = 0; i < count; i += lanes<T>) found = madd(load(x + i), load(y + i), found);
  return sum<T>(found);
}

// A row of keys or queries as the rule uses it, zero up to a whole number of vectors.
template <class T>
inline void read_key(const statetap_delta &c, const statetap_input &x, int64_t b, int64_t t, int64_t h, T by, T *to) {
  const int64_t padded = round_up(c.key_dim, lanes<T>);
  zero(to + c.key_dim, padded - c.key_dim);
  read_row(x, b, t, h, to, c.key_dim);
  if (c.normalise) by /= T(__builtin_sqrt(double(dot(to, to, padded)) + 1e-6));
  if (by != T(1)) scale(to, by, padded);
}

INLINE void fetch_row(const statetap_input &x, int64_t b, int64_t t, int64_t h, int64_t from, int64_t count) {
  constexpr int64_t size[] = {4, 8, 2, 2};
  const int64_t bytes = size[x.dtype];
  const char *at = (const char *)x.data + (b * x.stride[0] + t * x.stride[1] + h * x.stride[2] + from * x.stride[3]) * bytes;
  for (int64_t line = 0; line < count * bytes; line += 64) __builtin_prefetch(at + line, 0, FETCH);
}

// Ask for what `read_chunk` will read of some tokens: a hint, which no address makes wrong.
inline void fetch_rows(const statetap_delta &c, const Item &item, const statetap_chunk &chunk, int64_t from, int64_t to) {
  const int64_t key_head = item.head / (c.heads / c.key_heads);
  for (int64_t t = chunk.start + from; t < chunk.start + to; ++t) {
    fetch_row(c.k, chunk.row, t, key_head, 0, c.key_dim);
    if (c.outputs) fetch_row(c.q, chunk.row, t, key_head, 0, c.key_dim);
    fetch_row(c.v, chunk.row, t, item.head, item.begin, item.columns());
    if (c.per_channel) fetch_row(c.g, chunk.row, t, item.head, 0, c.key_dim);
  }
}

template <class T>
inline void read_chunk(const statetap_delta &c, const Item &item, const statetap_chunk &chunk, Scratch<T> &s, int64_t whole) {
  const int64_t K = c.key_dim, h = item.head, key_head = h / (c.heads / c.key_heads), b = chunk.row;
  const int64_t padded = round_up(K, lanes<T>);
  for (int64_t i = 0; i < chunk.length; ++i) {
    const int64_t t = chunk.start + i;
    read_key(c, c.k, b, t, key_head, T(1), s.k + i * PITCH);
    if (c.outputs) read_key(c, c.q, b, t, key_head, T(c.scale), s.q + i * PITCH);
    read_row(c.v, b, t, h, s.v + i * s.width, item.columns(), item.begin);
    zero(s.v + i * s.width + item.columns(), s.width - item.columns());
    s.beta[i] = read_one(c.beta, b, t, h, T(1));
    if (c.per_channel) {
      zero(s.decay + i * PITCH + K, padded - K);
      read_row(c.g, b, t, h, s.decay + i * PITCH, K);
    } else {
      s.decay[i] = read_one(c.g, b, t, h, T(0));
    }
  }
  // tokens that are not there: they keep the state and write nothing
  for (int64_t i = chunk.length; i < whole; ++i) {
    zero(s.k + i * PITCH, padded), zero(s.v + i * s.width, s.width);
    if (c.outputs) zero(s.q + i * PITCH, padded);
    s.beta[i] = 0;
    c.per_channel ? zero(s.decay + i * PITCH, padded) : zero(s.decay + i, 1);
  }
}

// What a trajectory keeps of the chunk's inputs, before the logs are exponentiated.
template <class T>
inline void keep_inputs(const statetap_delta &c, const Item &item, const statetap_chunk &chunk, const Scratch<T> &s) {
  if (!item.first()) return;
  const int64_t K = c.key_dim, group = c.heads / c.key_heads;
  for (int64_t i = 0; i < chunk.length; ++i) {
    const int64_t token = chunk.row * c.tokens + chunk.start + i, of_head = token * c.heads + item.head;
    if (c.keys && item.head % group == 0)
      write(c.keys, c.computed, (token * c.key_heads + item.head / group) * K, s.k + i * PITCH, K);
    if (c.betas) write(c.betas, c.computed, of_head, s.beta + i, 1);
    if (c.decays && c.per_channel) write(c.decays, c.computed, of_head * K, s.decay + i * PITCH, K);
    if (c.decays && !c.per_channel) write(c.decays, c.computed, of_head, s.decay + i, 1);
  }
}

// -- decays and products within a block ----------------------------------------------------------

// Products of decays over a block's tokens: pre up to each, suf after each, total over all. Each is a product of factors <= 1 and
// never a quotient, so that a token which wipes the state costs the others nothing.
template <class T>
inline void fold_decays(const statetap_delta &c, Scratch<T> &s, int64_t block) {
  const int64_t first = block * BLOCK, padded = round_up(c.key_dim, lanes<T>), at = first * PITCH;
  const T *gate = s.decay + (c.per_channel ? at : first);
  auto factor = [&](int i, int64_t x) { return c.per_channel ? load(gate + i * PITCH + x) : splat(gate[i]); };
  for (int64_t x = 0; x < padded; x += lanes<T>) {
    Vec<T> pre = splat(T(1)), suf = pre;
    for (int i = 0; i < BLOCK; ++i) {
      const int64_t row = at + i * PITCH + x;
      pre = pre * factor(i, x);
      store(s.erase + row, pre * load(s.k + row));
      if (c.outputs) store(s.see + row, pre * load(s.q + row));
    }
    for (int i = BLOCK - 1; i >= 0; --i) {
      const int64_t row = at + i * PITCH + x;
      store(s.put + row, suf * load(s.k + row));
      suf = suf * factor(i, x);
    }
    store(s.total + block * PITCH + x, suf);
  }
}

// Column J of kk and qk: what later rows of the block see of token J's key, through the decays between them.
template <class T, int J, bool CHANNELS>
INLINE void products_with_key(const statetap_delta &c, Scratch<T> &s, int64_t block) {
  const int64_t first = block * BLOCK, at = first * PITCH, padded = round_up(c.key_dim, lanes<T>);
  const T *k = s.k + at, *q = s.q + at, *gate = s.decay + (CHANNELS ? at : first);
  Vec<T> kk[BLOCK] = {}, qk[BLOCK] = {};
  for (int64_t x = 0; x < padded; x += lanes<T>) {
    Vec<T> key = load(k + J * PITCH + x);
    qk[J] = madd(load(q + J * PITCH + x), key, qk[J]);
#pragma GCC unroll 8
    for (int i = J + 1; i < BLOCK; ++i) {
      if (CHANNELS) key = key * load(gate + i * PITCH + x);
      kk[i] = madd(load(k + i * PITCH + x), key, kk[i]);
      qk[i] = madd(load(q + i * PITCH + x), key, qk[i]);
    }
  }
  T between = 1;
  for (int i = J; i < BLOCK; ++i) {
    if (!CHANNELS && i > J) between *= gate[i];
    s.kk[(first + i) * BLOCK + J] = between * sum<T>(kk[i]);
    s.qk[(first + i) * BLOCK + J] = between * sum<T>(qk[i]);
  }
}

template <class T, bool CHANNELS>
INLINE void products_with_keys(const statetap_delta &c, Scratch<T> &s, int64_t block) {
  if (c.replay && !c.outputs) return;  // nothing is solved, nothing read
  products_with_key<T, 0, CHANNELS>(c, s, block);
  products_with_key<T, 1, CHANNELS>(c, s, block);
  products_with_key<T, 2, CHANNELS>(c, s, block);
  products_with_key<T, 3, CHANNELS>(c, s, block);
  products_with_key<T, 4, CHANNELS>(c, s, block);
  products_with_key<T, 5, CHANNELS>(c, s, block);
  products_with_key<T, 6, CHANNELS>(c, s, block);
  products_with_key<T, 7, CHANNELS>(c, s, block);
}

template <class T>
inline void exponentiate(const statetap_delta &c, Scratch<T> &s, int64_t tokens) {
  for (int64_t i = 0; i < tokens; ++i)
    c.per_channel ? exp_all(s.decay + i * PITCH, round_up(c.key_dim, lanes<T>)) : void(s.decay[i] = exp_one(s.decay[i]));
}

template <class T>
inline void prepare(const statetap_delta &c, const Item &item, const statetap_chunk &chunk, Scratch<T> &s) {
  const int64_t whole = round_up(chunk.length, BLOCK);
  read_chunk(c, item, chunk, s, whole);
  keep_inputs(c, item, chunk, s);
  exponentiate(c, s, whole);
  for (int64_t block = 0; block < whole / BLOCK; ++block) {
    fold_decays(c, s, block);
    c.per_channel ? products_with_keys<T, true>(c, s, block) : products_with_keys<T, false>(c, s, block);
  }
}

// The same for a chunk of one token that `run_block` takes alone: to the bit what a whole block with seven missing gives.
template <class T>
inline void prepare_step(const statetap_delta &c, const Item &item, const statetap_chunk &chunk, Scratch<T> &s) {
  const int64_t padded = round_up(c.key_dim, lanes<T>);
  read_chunk(c, item, chunk, s, 1);
  exponentiate(c, s, 1);
  for (int64_t x = 0; x < padded; x += lanes<T>) {
    const Vec<T> left = c.per_channel ? load(s.decay + x) : splat(s.decay[0]);
    store(s.erase + x, left * load(s.k + x)), store(s.see + x, left * load(s.q + x));
    store(s.put + x, load(s.k + x)), store(s.total + x, left);
  }
  s.qk[0] = dot(s.q, s.k, padded);
}

}  // namespace STATETAP_LEVEL
}  // namespace statetap
