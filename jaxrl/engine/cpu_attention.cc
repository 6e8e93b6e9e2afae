// Attention of one query per row over a paged KV cache, for a CPU. cpu_attention.py compiles it and says what it computes.
//
// XLA has to copy every page before it can multiply; this reads each key and value once, where it lies. A row and key head is
// one unit of work, done by one thread in a fixed order, so results do not depend on the threads or on other rows.
// QUERIES (query heads per key head) and HEAD_DIM are given by the compiler's command line.

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <memory>
#include <thread>

#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace {

constexpr int kBlock = 64;  // keys per step of the running softmax
constexpr int kChunk = 4;   // units of work a thread takes at a time

struct Shape {
  int64_t num_rows, num_kv_heads, page_size, table_width;
};

// exp(x) for x <= 0 in float32, within about a unit in the last place: 2^n by its bits, the rest by its Taylor series.
inline float exp_nonpositive(float x) {
  x = x < -87.0f ? -87.0f : x;
  const float n = __builtin_rintf(x * 1.44269504f);
  float r = __builtin_fmaf(n, -0.693359375f, x);  // ln 2 in two parts, the first exact in few bits
  r = __builtin_fmaf(n, 2.12194440e-4f, r);
  float p = 1.0f / 5040;
  p = __builtin_fmaf(p, r, 1.0f / 720);
  p = __builtin_fmaf(p, r, 1.0f / 120);
  p = __builtin_fmaf(p, r, 1.0f / 24);
  p = __builtin_fmaf(p, r, 1.0f / 6);
  p = __builtin_fmaf(p, r, 0.5f);
  p = __builtin_fmaf(p, r, 1.0f);
  p = __builtin_fmaf(p, r, 1.0f);
  const int32_t bits = (static_cast<int32_t>(n) + 127) << 23;
  float power;
  std::memcpy(&power, &bits, sizeof power);
  return p * power;
}

// The queries [QUERIES, HEAD_DIM] of one key head over its first num_keys keys.
void attend(const float* q, const float* k_pages, const float* v_pages, const int32_t* table, int32_t num_keys, float scale,
            const Shape& shape, int64_t kv_head, float* out) {
  const int64_t page_stride = shape.num_kv_heads * shape.page_size * HEAD_DIM;
  float query[QUERIES][HEAD_DIM], acc[QUERIES][HEAD_DIM] = {}, score[QUERIES][kBlock], peak[QUERIES], total[QUERIES] = {};
  for (int m = 0; m < QUERIES; ++m) {
    peak[m] = -1e30f;
    for (int d = 0; d < HEAD_DIM; ++d) query[m][d] = q[m * HEAD_DIM + d] * scale;
  }
  for (int32_t begin = 0; begin < num_keys; begin += kBlock) {
    const int32_t count = std::min<int32_t>(kBlock, num_keys - begin);
    int64_t offset[kBlock];
    for (int32_t j = 0; j < count; ++j) {
      const int64_t key = begin + j;
      offset[j] = table[key / shape.page_size] * page_stride +
                  (kv_head * shape.page_size + key % shape.page_size) * HEAD_DIM;
    }
    for (int32_t j = 0; j < count; ++j) {
      const float* key = k_pages + offset[j];
      for (int m = 0; m < QUERIES; ++m) {
        float sum = 0;
        for (int d = 0; d < HEAD_DIM; ++d) sum += query[m][d] * key[d];
        score[m][j] = sum;
      }
    }
    for (int m = 0; m < QUERIES; ++m) {
      float top = peak[m], sum = 0;
      for (int32_t j = 0; j < count; ++j) top = score[m][j] > top ? score[m][j] : top;
      const float shrink = exp_nonpositive(peak[m] - top);
      for (int32_t j = 0; j < count; ++j) {
        score[m][j] = exp_nonpositive(score[m][j] - top);
        sum += score[m][j];
      }
      peak[m] = top;
      total[m] = total[m] * shrink + sum;
      for (int d = 0; d < HEAD_DIM; ++d) acc[m][d] *= shrink;
    }
    for (int32_t j = 0; j < count; ++j) {
      const float* value = v_pages + offset[j];
      for (int m = 0; m < QUERIES; ++m)
        for (int d = 0; d < HEAD_DIM; ++d) acc[m][d] += score[m][j] * value[d];
    }
  }
  for (int m = 0; m < QUERIES; ++m)
    for (int d = 0; d < HEAD_DIM; ++d) out[m * HEAD_DIM + d] = acc[m][d] / total[m];
}

ffi::Error run(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> q, ffi::Buffer<ffi::F32> k_pages, ffi::Buffer<ffi::F32> v_pages,
               ffi::Buffer<ffi::S32> tables, ffi::Buffer<ffi::S32> position, float scale, ffi::ResultBuffer<ffi::F32> out) {
  const Shape shape{q.dimensions()[0], k_pages.dimensions()[1], k_pages.dimensions()[2], tables.dimensions()[1]};
  const int64_t num_units = shape.num_rows * shape.num_kv_heads, num_chunks = (num_units + kChunk - 1) / kChunk;
  const float *queries = q.typed_data(), *keys = k_pages.typed_data(), *values = v_pages.typed_data();
  const int32_t *table = tables.typed_data(), *last = position.typed_data();
  float* results = out->typed_data();

  struct Progress {
    std::atomic<int64_t> taken{0}, done{0};
  };
  auto progress = std::make_shared<Progress>();  // a helper may start when all is done and this call is over
  auto work = [=] {
    for (int64_t chunk; (chunk = progress->taken.fetch_add(1)) < num_chunks;) {
      for (int64_t unit = chunk * kChunk; unit < std::min(num_units, (chunk + 1) * kChunk); ++unit) {
        const int64_t row = unit / shape.num_kv_heads, start = unit * QUERIES * HEAD_DIM;
        attend(queries + start, keys, values, table + row * shape.table_width, last[row] + 1, scale, shape,
               unit % shape.num_kv_heads, results + start);
      }
      progress->done.fetch_add(1);
    }
  };
  for (int64_t i = 1; i < std::min(pool.num_threads(), num_chunks); ++i) pool.Schedule([work] { work(); });
  work();  // this thread as well: it would finish alone if no helper ever came
  while (progress->done.load() < num_chunks) std::this_thread::yield();
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(PagedAttention, run,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Attr<float>("scale")
                                  .Ret<ffi::Buffer<ffi::F32>>());
