// Any tokens, lengths, counts and scores through encode_sequences, into a buffer that ends where an allocation ends.
//
// The first byte chooses the style and what is present; DAGSERVE_TABLES names a tokenizer's tables.
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "cpu_nodes.h"
#include "unicode.h"

namespace {

using namespace dagserve;

[[noreturn]] void fail(const char* what) {
  std::fprintf(stderr, "%s\n", what);
  std::abort();
}

constexpr std::int64_t kPrompts = 2, kSequences = 3, kSteps = 4, kRows = kPrompts * kSequences;
constexpr std::int64_t kBodyBytes = 1500;  // small, so that some replies do not fit

// Bytes of the input, zeros when they are used up.
class Source {
 public:
  Source(const std::uint8_t* data, std::size_t size) : data_(data), left_(size) {}
  template <class T>
  T take() {
    T value{};
    const std::size_t bytes = std::min(sizeof(T), left_);
    std::memcpy(&value, data_, bytes);
    data_ += bytes;
    left_ -= bytes;
    return value;
  }

 private:
  const std::uint8_t* data_;
  std::size_t left_;
};

Tensor tensor_of(Dtype dtype, std::vector<std::int64_t> shape, void* data) {
  Tensor tensor;
  tensor.dtype = dtype;
  tensor.rank = static_cast<int>(shape.size());
  tensor.data = data;
  std::ranges::copy(shape, tensor.shape);
  std::ranges::copy(shape, tensor.bound);
  return tensor;
}

LoadedCpuNode make_node(const char* style) {
  const char* const tables = std::getenv("DAGSERVE_TABLES");
  const std::string path = tables ? tables : "tokenizer.bin";
  const std::size_t slash = path.rfind('/');
  NodeConfig config;
  config.op = "encode_sequences";
  config.root = slash == std::string::npos ? "." : path.substr(0, slash);
  config.options =
      std::string("{\"tables\":\"") + path.substr(slash + 1) + "\",\"style\":\"" + style + "\",\"model\":\"m\"}";
  const std::vector<std::int64_t> rows = {kPrompts, kSequences};
  const std::vector<std::int64_t> steps = {kPrompts, kSequences, kSteps};
  config.inputs = {{"tokens", "", tensor_of(Dtype::i64, steps, nullptr)},
                   {"lengths", "", tensor_of(Dtype::i32, rows, nullptr)},
                   {"scores", "", tensor_of(Dtype::f32, rows, nullptr)},
                   {"counts", "", tensor_of(Dtype::i32, {kPrompts}, nullptr)},
                   {"cu_seqlens", "", tensor_of(Dtype::i32, {kPrompts + 1}, nullptr)},
                   {"step_scores", "", tensor_of(Dtype::f32, steps, nullptr)},
                   {"return_tokens", "", tensor_of(Dtype::boolean, {}, nullptr)},
                   {"return_scores", "", tensor_of(Dtype::boolean, {}, nullptr)},
                   {"finished", "", tensor_of(Dtype::boolean, rows, nullptr)}};
  config.outputs = {{"body", "", tensor_of(Dtype::u8, {kBodyBytes}, nullptr)}};
  return LoadedCpuNode(find_cpu_node("encode_sequences", ""), config);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  static const LoadedCpuNode nodes[] = {make_node("results"), make_node("completions"), make_node("beams")};
  Source source(data, size);
  const auto choice = source.take<std::uint8_t>();
  std::int64_t tokens[kRows * kSteps];
  std::int32_t lengths[kRows], counts[kPrompts], cu_seqlens[kPrompts + 1] = {0, 3, 9};
  float scores[kRows], steps[kRows * kSteps];
  bool finished[kRows], yes = (choice & 4) != 0;
  for (auto& value : tokens) value = source.take<std::uint16_t>();
  if (choice & 8) tokens[0] = source.take<std::int64_t>();
  for (auto& value : lengths) value = source.take<std::int8_t>() % 6;
  for (auto& value : counts) value = source.take<std::int8_t>() % 5;
  for (auto& value : scores) value = source.take<float>();
  for (auto& value : steps) value = source.take<float>();
  for (auto& value : finished) value = source.take<std::uint8_t>() & 1;
  const std::vector<std::int64_t> rows = {kPrompts, kSequences};
  const std::vector<std::int64_t> all = {kPrompts, kSequences, kSteps};
  Tensor inputs[] = {tensor_of(Dtype::i64, all, tokens),
                     tensor_of(Dtype::i32, rows, lengths),
                     tensor_of(Dtype::f32, rows, scores),
                     tensor_of(Dtype::i32, {kPrompts}, counts),
                     tensor_of(Dtype::i32, {kPrompts + 1}, cu_seqlens),
                     tensor_of(Dtype::f32, all, steps),
                     tensor_of(Dtype::boolean, {}, &yes),
                     tensor_of(Dtype::boolean, {}, &yes),
                     tensor_of(Dtype::boolean, rows, finished)};
  inputs[5].present = (choice & 16) != 0;
  const std::unique_ptr<char[]> body(new char[kBodyBytes]);
  Tensor output = tensor_of(Dtype::u8, {kBodyBytes}, body.get());
  const LoadedCpuNode& node = nodes[(choice & 3) % 3];
  const std::unique_ptr<std::byte[]> workspace(new std::byte[node.workspace_bytes()]);
  Status status;
  node.run(inputs, {&output, 1}, {workspace.get(), node.workspace_bytes()}, status);
  if (!status.ok()) return 0;
  if (find_invalid_utf8({body.get(), static_cast<std::size_t>(output.shape[0])}) != std::string_view::npos)
    fail("a reply that is not UTF-8");
  return 0;
}
