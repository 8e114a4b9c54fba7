// The frozen plan in native terms: plan.json after dagserve/engine.py has read it (docs/plan.md).
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "dagserve/node.h"

namespace dagserve {

// symbol + add; a constant where symbol is -1.
struct Dim {
  int symbol = -1;
  std::int64_t add = 0;
};

struct Symbol {
  std::string name;
  std::int64_t bound = 0;
};

struct TensorSpec {
  std::string name;
  Dtype dtype = Dtype::u8;
  std::vector<Dim> shape;
  std::int64_t capacity = 0;  // bytes; of the payload for text
  bool borrowed = false;      // no buffer: the node that makes it points it at memory that outlives the request
};

struct InputSpec {
  std::string name;
  int tensor = -1;
  bool optional = false;
  bool has_default = false;
  std::vector<std::int64_t> integers;  // default of an integer or bool input
  std::vector<double> reals;           // default of an f32 input
  std::vector<std::string> texts;      // default of a text input
};

struct Operand {
  enum class Kind : std::uint8_t { tensor, local, iota, count, scalar, row } kind = Kind::tensor;
  int index = -1;  // tensor, row or local; iota: the cu_seqlens tensor; count, scalar: the value, -1 for the default
  // iota: whose longest length it has; `first` is at least 1, of row 0 of packed tokens with a shared prefix
  enum class Rows : std::uint8_t { all, first, rest } rows = Rows::all;
  int ends = -1;           // row: the i32 tensor of where rows end
  int row = 0;             // row: which, from element `row` of `ends` to the next
  std::int64_t bound = 0;  // iota: longest length; count: the value where the tensor is absent
  int at_most = -1;        // count: the tensor that limits a default, -1 for `at_most_default`
  std::int64_t at_most_default = INT64_MAX;
  float scalar = 0;  // scalar: the value where the tensor is absent
};

struct CallSpec {
  int package = -1;
  std::vector<Operand> inputs;
  std::vector<Operand> outputs;
  int when = -1;        // tensor whose element 0 decides, or -1
  int when_local = -1;  // the same for a local of dtype u8 or bool
  std::int64_t equals = 0;
  std::int64_t when_default = 0;  // value of an absent `when` tensor
};

struct CheckSpec {
  enum class Kind : std::uint8_t { packed, range, at_most } kind = Kind::range;
  int tensor = -1;  // packed: tokens
  int other = -1;   // at_most: the i64 scalar that `tensor` may not exceed
  int cu_seqlens = -1;
  bool shared = false;  // packed: row 0 is a prefix of all others, and may be empty
  std::int64_t max_length = 0;
  std::int64_t low = 0;
  std::int64_t high = 0;
};

struct NodeSpec {
  std::string name;
  bool aoti = false;
  std::vector<int> inputs;  // tensor indexes, in port order; -1 is an unconnected optional port
  std::vector<int> outputs;
  NodeConfig config;
  std::string library;                         // path of a shared library; empty: a node of our own
  const dagserve_cpu_node* foreign = nullptr;  // a node of the program that loads the plan
  std::vector<CheckSpec> checks;
  std::vector<CallSpec> calls;
  int locals = 0;
};

struct PackagePort {
  std::string name;
  Dtype dtype = Dtype::f32;
  std::vector<Dim> shape;
};

struct WeightSpec {
  std::string name;
  Dtype dtype = Dtype::f32;
  std::vector<std::int64_t> shape;
  std::int64_t offset = 0;
  std::int64_t bytes = 0;
};

struct PackageSpec {
  std::string name;
  std::string path;
  std::vector<PackagePort> inputs;
  std::vector<PackagePort> outputs;
  std::vector<std::pair<std::string, std::string>> constants;  // original name -> weight
};

struct Plan {
  std::string root;
  std::vector<Symbol> symbols;
  std::vector<TensorSpec> tensors;
  std::vector<InputSpec> inputs;
  std::vector<NodeSpec> nodes;
  int response = -1;
  std::vector<PackageSpec> packages;
  std::string weights_path;
  std::int64_t weights_bytes = 0;
  std::vector<WeightSpec> weights;
  int runners = 1;
  int contexts = 1;
  int in_flight = 1;
  int max_queued = 0;
  double max_wait_s = 0;
  double deadline_s = 1;
};

std::size_t dtype_bytes(Dtype dtype);
const char* dtype_name(Dtype dtype);

// Rejects a plan that would index out of range or overflow a buffer. Throws std::invalid_argument.
void validate(const Plan& plan);

}  // namespace dagserve
