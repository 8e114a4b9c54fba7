// Any bytes as the body of a request, over tensors whose buffers end where an allocation ends.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string_view>
#include <vector>

#include "json_place.h"
#include "request_decoder.h"
#include "unicode.h"

namespace {

using namespace dagserve;

[[noreturn]] void fail(const char* what) {
  std::fprintf(stderr, "%s\n", what);
  std::abort();
}

struct Input {
  const char* name;
  Dtype dtype;
  std::int64_t rows;  // 0: a scalar
  bool optional;
};

constexpr std::int64_t kTextBytes = 24;
constexpr Input kInputs[] = {
    {"query", Dtype::text, 0, false},
    {"items", Dtype::text, 5, false},
    {"ids", Dtype::i64, 4, true},
    {"small", Dtype::i32, 3, true},
    {"tiny", Dtype::u8, 2, true},
    {"real", Dtype::f32, 3, true},
    {"apply_softmax", Dtype::boolean, 0, true},
    {"allow", Dtype::text, 3, true},
    {"allow_where", Dtype::text, 4, true},
};

Plan make_plan() {
  Plan plan;
  for (const Input& input : kInputs) {
    const auto index = static_cast<int>(plan.tensors.size());
    TensorSpec spec{input.name, input.dtype, {}, kTextBytes};
    if (input.rows) spec.shape.push_back({-1, input.rows});
    if (input.dtype != Dtype::text)
      spec.capacity = std::max<std::int64_t>(input.rows, 1) * static_cast<std::int64_t>(dtype_bytes(input.dtype));
    plan.tensors.push_back(spec);
    InputSpec declared;
    declared.name = input.name;
    declared.tensor = index;
    declared.optional = input.optional;
    plan.inputs.push_back(declared);
  }
  plan.inputs[6].optional = false;
  plan.inputs[6].has_default = true;
  plan.inputs[6].integers = {1};
  return plan;
}

std::vector<EndpointSpec> make_endpoints() {
  using Kind = FieldSpec::Kind;
  return {{"fuzz",
           {
               {"query", Kind::input, 0, false, "", ""},
               {"items", Kind::input, 1, true, "", ""},
               {"texts", Kind::input, 1, false, "", ""},
               {"ids", Kind::input, 2, false, "", ""},
               {"small", Kind::input, 3, true, "", ""},
               {"options.tiny", Kind::input, 4, true, "", "", true},
               {"options.real", Kind::input, 5, true, "", ""},
               {"apply_softmax", Kind::input, 6, false, "", ""},
               {"item_first", Kind::constant, -1, false, "false", "it is fixed"},
               {"temperature", Kind::constant, -1, false, "1", "it is fixed"},
               {"model", Kind::model, -1, false, "m", ""},
               {"labels", Kind::fixed, -1, false, "", ""},
               {"user", Kind::ignored, -1, false, "", ""},
               {"allow", Kind::input, 7, false, "", ""},
               {"allow.item", Kind::input, 7, false, "", ""},
               {"allow.region", Kind::term, 8, true, "text", ""},
               {"allow.stock", Kind::term, 8, true, "bool", "", true},
               {"allow.price", Kind::term, 8, true, "number", ""},
           }}};
}

// One tensor over memory of exactly its size.
struct Buffer {
  std::unique_ptr<std::byte[]> data;
  std::unique_ptr<std::int64_t[]> offsets;
  Tensor tensor;

  explicit Buffer(const TensorSpec& spec) : data(new std::byte[static_cast<std::size_t>(spec.capacity)]) {
    tensor.dtype = spec.dtype;
    tensor.rank = static_cast<int>(spec.shape.size());
    tensor.capacity = spec.capacity;
    tensor.data = data.get();
    if (tensor.rank) tensor.bound[0] = spec.shape[0].add;
    if (spec.dtype != Dtype::text) return;
    offsets.reset(new std::int64_t[static_cast<std::size_t>(tensor.rank ? tensor.bound[0] : 1) + 1]);
    tensor.offsets = offsets.get();
  }
};

void check(const Tensor& tensor) {
  if (!tensor.present) return;
  if (tensor.rank && (tensor.shape[0] < 1 || tensor.shape[0] > tensor.bound[0])) fail("a shape out of its bound");
  if (tensor.dtype != Dtype::text) return;
  for (std::int64_t row = 0; row < tensor.rows(); ++row) {
    if (tensor.offsets[row + 1] < tensor.offsets[row]) fail("offsets that fall");
    if (find_invalid_utf8(tensor.text(row)) != std::string_view::npos) fail("text that is not UTF-8");
  }
  if (tensor.offsets[tensor.rows()] > tensor.capacity) fail("text beyond its capacity");
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  static const Plan plan = make_plan();
  static const std::vector<EndpointSpec> endpoints = make_endpoints();
  static RequestDecoder decoder(plan, endpoints);
  const std::unique_ptr<char[]> body(new char[size + kBodyPadding]());
  std::memcpy(body.get(), data, size);
  const std::string_view text(body.get(), size);
  std::vector<Buffer> buffers;
  std::vector<Tensor> inputs;
  for (const TensorSpec& spec : plan.tensors) buffers.emplace_back(spec);
  for (const Buffer& buffer : buffers) inputs.push_back(buffer.tensor);
  Status status;
  decoder.decode(0, text, inputs, status);
  if (status.ok())
    for (const Tensor& tensor : inputs) check(tensor);
  else if (!status.message[0])
    fail("an error without a message");
  char place[32];
  json_place(text, std::min(size, find_bad_text(text)), place);
  return 0;
}
