// What a CPU node sees: tensors of its context, a status to fill, a workspace. No allocation, no exceptions, no Python.
#pragma once

#include <bit>
#include <cstdarg>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <memory>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "dagserve/cpu_node.h"

namespace dagserve {

// Constants alone may be f8e4m3.
enum class Dtype : std::uint8_t { u8, boolean, i32, i64, f16, bf16, f32, text, f8e4m3 };

// The closed set of request errors; dagserve/errors.py has the same names.
enum class Code : std::uint8_t {
  ok,
  invalid_request,
  overloaded,
  deadline_exceeded,
  cancelled,
  draining,
  internal,
  unknown_model
};

// The outcome of a step. Lives in the context, so that failing allocates nothing.
struct Status {
  Code code = Code::ok;
  char node[64] = {};
  char message[512] = {};

  bool ok() const { return code == Code::ok; }

  // Sets code and message (printf format, cut at the buffer's end).
  __attribute__((format(printf, 3, 4))) void fail(Code failure, const char* format, ...) {
    std::va_list arguments;
    va_start(arguments, format);
    fail_with(failure, format, arguments);
    va_end(arguments);
  }

  __attribute__((format(printf, 3, 0))) void fail_with(Code failure, const char* format, std::va_list arguments) {
    code = failure;
    std::vsnprintf(message, sizeof(message), format, arguments);
  }

  void clear() {
    code = Code::ok;
    node[0] = 0;
    message[0] = 0;
  }
};

constexpr int kMaxRank = 4;

// A tensor of a context with its logical shape. For text, `data` is the UTF-8 payload, `offsets` has rows() + 1 byte
// offsets, and a scalar has one row.
struct Tensor {
  void* data = nullptr;
  std::int64_t* offsets = nullptr;
  Dtype dtype = Dtype::u8;
  bool present = true;  // false: an optional input the request left out
  int rank = 0;
  std::int64_t shape[kMaxRank] = {};  // logical sizes; a node sets those of its outputs
  std::int64_t bound[kMaxRank] = {};  // largest sizes
  std::int64_t capacity = 0;          // bytes at `data`

  std::int64_t rows() const { return rank == 0 ? 1 : shape[0]; }
  std::int64_t numel() const {
    std::int64_t count = 1;
    for (int i = 0; i < rank; ++i) count *= shape[i];
    return count;
  }
  std::string_view text(std::int64_t row) const {
    return {static_cast<const char*>(data) + offsets[row], static_cast<std::size_t>(offsets[row + 1] - offsets[row])};
  }
  template <class T>
  T* as() const {
    return static_cast<T*>(data);
  }
};

// One template part: literal text of the manifest, or the input of that index.
struct Segment {
  std::string literal;
  int input = -1;

  bool operator==(const Segment&) const = default;
};

// A node's options after compile, by name.
using Value = std::variant<std::int64_t, double, std::string, std::vector<std::int64_t>, std::vector<std::string>,
                           std::vector<Segment>>;
struct Config {
  // Throws std::invalid_argument where the options are no JSON object, or have a value nodes do not take.
  explicit Config(const dagserve_config& config);

  std::vector<std::pair<std::string, Value>> values;
  std::vector<std::string> inputs;  // port names, in the order of CpuNode::run's spans
  std::vector<std::string> outputs;
  std::vector<Tensor> input_bounds;  // dtype, rank and bound of each port's tensor; data is null
  std::vector<Tensor> output_bounds;
  std::string root;  // artifact directory

  // Throws std::invalid_argument naming the key when it is absent or of another type: load time only.
  template <class T>
  const T& at(std::string_view key) const {
    for (const auto& [name, value] : values)
      if (name == key)
        if (const T* found = std::get_if<T>(&value)) return *found;
    throw std::invalid_argument("node option '" + std::string(key) + "' is missing or of another type");
  }

  // The same with a value for an option that is left out, or is an empty list, whose type cannot be known.
  template <class T>
  T get(std::string_view key, T otherwise) const {
    for (const auto& [name, value] : values)
      if (name == key && value != Value(std::vector<std::int64_t>{})) return at<T>(key);
    return otherwise;
  }
};

// A node of our own, behind the C interface. Construction may allocate and throw (load time); run() may do neither, and
// is called by several threads at once, each with its own tensors and workspace.
class CpuNode {
 public:
  virtual ~CpuNode() = default;
  virtual std::size_t workspace_bytes() const { return 0; }  // per context, 64-byte aligned
  virtual void run(std::span<const Tensor> inputs, std::span<Tensor> outputs, std::span<std::byte> workspace,
                   Status& status) const noexcept = 0;
};

// A port as a plan has it.
struct PortSpec {
  std::string name;
  std::string tensor;
  Tensor bound;
};

// All that `dagserve_config` points to.
struct NodeConfig {
  std::string op;
  std::string root;
  std::string options = "{}";  // JSON
  std::vector<PortSpec> inputs;
  std::vector<PortSpec> outputs;

  // Calls `use` with the C form, which is gone afterwards.
  template <class Use>
  auto with(Use use) const {
    const std::vector<dagserve_port> from = ports(inputs);
    const std::vector<dagserve_port> to = ports(outputs);
    const dagserve_config config = {DAGSERVE_NODE_ABI, op.c_str(),  root.c_str(), options.c_str(),
                                    from.size(),       from.data(), to.size(),    to.data()};
    return use(config);
  }

 private:
  static std::vector<dagserve_port> ports(const std::vector<PortSpec>& specs) {
    std::vector<dagserve_port> result;
    for (const PortSpec& spec : specs)
      result.push_back({spec.name.c_str(), spec.tensor.c_str(), std::bit_cast<dagserve_tensor>(spec.bound)});
    return result;
  }
};

}  // namespace dagserve
