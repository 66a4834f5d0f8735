// The gated delta rule and Kimi's: one head's state through one sequence, chunk by chunk. Built once for each instruction set.
#include <atomic>

#include "taps.h"
#include "threads.h"

namespace statetap {
namespace STATETAP_LEVEL {
namespace {

template <class T>
struct Run {
  const statetap_delta &c;
  const Item &item;
  Scratch<T> &s;
  const bool taps = c.states || c.norms || c.reads;

  void sequence() {
    const statetap_chunk *chunk = c.chunks + c.first[item.sequence], *end = c.chunks + c.first[item.sequence + 1];
    if (end - chunk == 1 && is_step(*chunk)) return step(*chunk);
    if (chunk == end && !c.replay) take_initial(), rows_to_tiles(c, s);
    for (bool first = true; chunk < end; ++chunk, first = false) {
      enter(*chunk, first);
      if (chunk->length) run(*chunk, chunk + 1 < end ? chunk + 1 : nullptr);
    }
    if (!c.replay) {
      tiles_to_rows(c, s);
      write_rows(c, item, s, c.final_state, c.computed, state_at(item.sequence));
    } else if (end > c.chunks + c.first[item.sequence] && taps) {
      take(c.final_state, c.computed, state_at(item.sequence), c.value_dim, 1);
      give_entering(c, item, end[-1].row, end[-1].start + end[-1].length - 1, s, false);
    }
  }

 private:
  int64_t state_at(int64_t n) const { return (n * c.heads + item.head) * c.key_dim * c.value_dim; }

  bool written(const statetap_chunk &chunk) const {
    return chunk.write >= 0 && c.write_heads[chunk.write * c.heads + item.head];
  }

  // `rows` from a state that is stored with these strides along keys and values.
  void take(const void *data, int64_t dtype, int64_t at, int64_t along_k, int64_t along_v) {
    for (int64_t k = 0; k < c.key_dim; ++k) {
      T *row = s.rows + k * s.width;
      zero(row, s.width);
      if (data) read(data, dtype, at + k * along_k + item.begin * along_v, along_v, row, item.columns());
    }
  }

  void take_initial() {
    const statetap_input &x = c.initial_state;
    take(x.data, x.dtype, item.sequence * x.stride[0] + item.head * x.stride[1], x.stride[2], x.stride[3]);
  }

  // The state that enters a chunk: in the tiles, and in `rows` if anything looks at it.
  void enter(const statetap_chunk &chunk, bool first) {
    if (c.replay)
      take(c.chunk_states, c.store_dtype, state_at(chunk.slot), c.value_dim, 1);
    else if (written(chunk))
      take(c.write_values, c.computed, state_at(chunk.write), c.value_dim, 1);
    else if (first)
      take_initial();
    else if (taps || c.chunk_states)
      tiles_to_rows(c, s);
    if (written(chunk) || (c.replay && !first)) give_entering(c, item, chunk.row, chunk.start - 1, s, written(chunk));
    if (c.replay || written(chunk) || first) rows_to_tiles(c, s);
    if (c.chunk_states && !c.replay) write_rows(c, item, s, c.chunk_states, c.store_dtype, state_at(chunk.slot));
  }

  void run(const statetap_chunk &chunk, const statetap_chunk *next) {
    if (c.norms) s.square = square_of(s.state, c.key_dim * s.width);
    prepare(c, item, chunk, s);
    run_chunk(c, item, s, chunk.length, next);
    write_tokens(chunk);
    if (taps) give_taps(c, item, chunk, s);
  }

  void write_tokens(const statetap_chunk &chunk) {
    for (int64_t i = 0; i < chunk.length; ++i) {
      const int64_t at = ((chunk.row * c.tokens + chunk.start + i) * c.heads + item.head) * c.value_dim + item.begin;
      if (c.outputs) write(c.outputs, c.output_dtype, at, s.o + i * s.width, item.columns());
      if (c.updates) write(c.updates, c.store_dtype, at, s.u + i * s.width, item.columns());
    }
  }

  // -- one token: from the initial state to the final one, with no copy of either ----------------

  bool is_step(const statetap_chunk &chunk) const {
    const statetap_input &x = c.initial_state;
    return chunk.length == 1 && chunk.write < 0 && !taps && !c.chunk_states && !c.replay && x.data && x.dtype == c.computed &&
           x.stride[3] == 1 && item.columns() % lanes<T> == 0;
  }

  void step(const statetap_chunk &chunk) {
    prepare_step(c, item, chunk, s);
    const statetap_input &x = c.initial_state;
    const T *from = (const T *)x.data + item.sequence * x.stride[0] + item.head * x.stride[1] + item.begin;
    T *to = (T *)c.final_state + state_at(item.sequence) + item.begin;
    int64_t column = 0;
    for (; column + GROUP * lanes<T> <= item.columns(); column += GROUP * lanes<T>)
      run_block<T, 1, GROUP>(c, s, 0, 1, column, from + column, x.stride[2], to + column, c.value_dim);
    for (; column < item.columns(); column += lanes<T>)
      run_block<T, 1, 1>(c, s, 0, 1, column, from + column, x.stride[2], to + column, c.value_dim);
    write_tokens(chunk);
  }
};

struct Work {
  const statetap_delta &call;
  int64_t pieces, columns;  // of a head's value columns
  std::atomic<bool> no_memory{false};
};

// A head is cut along its value columns, which do not meet, only where there are fewer heads than threads.
template <class T>
int64_t columns_of_a_piece(const statetap_delta &c) {
  const int64_t whole = round_up(c.value_dim, COLUMNS<T>), items = c.sequences * c.heads;
  if (c.norms || items >= c.threads || items == 0) return whole;
  const int64_t pieces = least((c.threads + items - 1) / items, whole / COLUMNS<T>);
  return round_up((whole + pieces - 1) / pieces, COLUMNS<T>);
}

template <class T>
void run_item(const void *context, int64_t n) {
  Work &work = *(Work *)context;
  const statetap_delta &c = work.call;
  const int64_t begin = n % work.pieces * work.columns, whole = n / work.pieces;
  const Item item{whole / c.heads, whole % c.heads, begin, least(begin + work.columns, c.value_dim)};
  NoSubnormals guard;
  Scratch<T> scratch;
  if (allocate(c, item.columns(), scratch))
    Run<T>{c, item, scratch}.sequence();
  else
    work.no_memory = true;
}

template <class T>
int32_t run(const statetap_delta &c) {
  const int64_t columns = columns_of_a_piece<T>(c), pieces = (c.value_dim + columns - 1) / columns;
  Work work{c, pieces, columns};
  parallel(c.threads, c.sequences * c.heads * pieces, run_item<T>, &work);
  return work.no_memory ? STATETAP_NO_MEMORY : STATETAP_OK;
}

}  // namespace

int32_t gated_delta_rule(const statetap_delta &c) {
  return c.computed == STATETAP_FLOAT64 ? run<double>(c) : run<float>(c);
}

}  // namespace STATETAP_LEVEL
}  // namespace statetap
