// The gated delta rule and Kimi's: the states of some heads through one sequence, chunk by chunk. Built once for each
// instruction set.
#include <atomic>

#include "taps.h"
#include "threads.h"

namespace statetap {
namespace STATETAP_LEVEL {
namespace {

template <class T>
struct Run {
  const statetap_delta &c;
  Item item;
  Scratch<T> &s;
  const bool taps = c.states || c.norms || c.reads;

  // Chunk by chunk, and in each the heads one after the other: their rows lie side by side, on the same pages.
  void heads(int64_t count) {
    const statetap_chunk *chunk = c.chunks + c.first[item.sequence], *end = c.chunks + c.first[item.sequence + 1];
    const int64_t head = item.head;
    auto each = [&](auto work) {
      for (int64_t n = 0; n < count; ++n) item.head = head + n, s.state = s.states + n * c.key_dim * s.width, work();
    };
    auto next = [&] {
      Item after = item;
      after.head = item.head + 1 < head + count ? item.head + 1 : head;
      return after;
    };
    if (end - chunk == 1 && is_step(*chunk)) return each([&] { step(*chunk); });
    if (chunk == end && !c.replay) each([&] { take_initial(), rows_to_tiles(c, s); });
    for (bool first = true; chunk < end; ++chunk, first = false)
      each([&] {
        enter(*chunk, first);
        if (chunk->length) run(*chunk, next(), item.head + 1 < head + count ? chunk : chunk + 1 < end ? chunk + 1 : nullptr);
      });
    each([&] { leave(end); });
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

  void leave(const statetap_chunk *end) {
    if (!c.replay) {
      tiles_to_rows(c, s);
      write_rows(c, item, s, c.final_state, c.computed, state_at(item.sequence));
    } else if (end > c.chunks + c.first[item.sequence] && taps) {
      take(c.final_state, c.computed, state_at(item.sequence), c.value_dim, 1);
      give_entering(c, item, end[-1].row, end[-1].start + end[-1].length - 1, s, false);
    }
  }

  void run(const statetap_chunk &chunk, const Item &next_item, const statetap_chunk *next) {
    if (c.norms) s.square = square_of(s.state, c.key_dim * s.width);
    prepare(c, item, chunk, s);
    run_chunk(c, s, chunk.length, next_item, next);
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
  int64_t heads;             // of a piece of work
  int64_t columns;           // of a piece of work
  int64_t groups, slabs;     // pieces a sequence has along its heads, and along their value columns
  std::atomic<bool> no_memory{false};
};

INLINE int64_t pieces(int64_t whole, int64_t part) { return (whole + part - 1) / part; }

// Heads are cut as evenly as the threads need, no more than eight together, whose states stay in the second cache. They are cut
// along their value columns, which do not meet, only where there are fewer heads than threads.
template <class T>
void divide(const statetap_delta &c, Work &work) {
  const int64_t items = c.sequences * c.heads, whole = round_up(c.value_dim, COLUMNS<T>);
  int64_t least_rounds = INT64_MAX;
  for (int64_t heads = least(8, c.heads); heads > 0; --heads) {
    const int64_t rounds = pieces(c.sequences * pieces(c.heads, heads), c.threads) * heads;
    if (rounds < least_rounds) least_rounds = rounds, work.heads = heads;
  }
  work.columns = whole;
  if (items < c.threads && items > 0 && !c.norms)
    work.columns = round_up(pieces(whole, least(pieces(c.threads, items), whole / COLUMNS<T>)), COLUMNS<T>);
  work.groups = pieces(c.heads, work.heads), work.slabs = pieces(c.value_dim, work.columns);
}

template <class T>
void run_piece(const void *context, int64_t n) {
  Work &work = *(Work *)context;
  const statetap_delta &c = work.call;
  const int64_t begin = n % work.slabs * work.columns, head = n / work.slabs % work.groups * work.heads;
  const Item item{n / work.slabs / work.groups, head, begin, least(begin + work.columns, c.value_dim)};
  NoSubnormals guard;
  Scratch<T> scratch;
  if (allocate(c, work.heads, item.columns(), scratch))
    Run<T>{c, item, scratch}.heads(least(work.heads, c.heads - head));
  else
    work.no_memory = true;
}

template <class T>
int32_t run(const statetap_delta &c) {
  Work work{c, 1, 0, 0, 0};
  divide<T>(c, work);
  parallel(c.threads, c.sequences * work.groups * work.slabs, run_piece<T>, &work);
  return work.no_memory ? STATETAP_NO_MEMORY : STATETAP_OK;
}

}  // namespace

int32_t gated_delta_rule(const statetap_delta &c) {
  return c.computed == STATETAP_FLOAT64 ? run<double>(c) : run<float>(c);
}

}  // namespace STATETAP_LEVEL
}  // namespace statetap
