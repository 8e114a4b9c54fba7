#include "dagserve/plan.h"

namespace dagserve {

std::size_t dtype_bytes(Dtype dtype) {
  switch (dtype) {
    case Dtype::i64:
      return 8;
    case Dtype::i32:
    case Dtype::f32:
      return 4;
    case Dtype::f16:
    case Dtype::bf16:
      return 2;
    case Dtype::u8:
    case Dtype::boolean:
    case Dtype::text:
    case Dtype::f8e4m3:
      return 1;
  }
  return 1;
}

const char* dtype_name(Dtype dtype) {
  constexpr const char* kNames[] = {"u8", "bool", "i32", "i64", "f16", "bf16", "f32", "text", "f8e4m3"};
  return kNames[static_cast<int>(dtype)];
}

namespace {

[[noreturn]] void reject(const std::string& where, const std::string& what) {
  throw std::invalid_argument("plan: " + where + ": " + what + "; compile the manifest again");
}

void check_index(const std::string& where, int index, std::size_t count, bool absent_allowed = false) {
  if (absent_allowed && index == -1) return;
  if (index < 0 || static_cast<std::size_t>(index) >= count)
    reject(where, "index " + std::to_string(index) + " is out of range");
}

void check_dims(const Plan& plan, const std::string& where, const std::vector<Dim>& shape) {
  if (shape.size() > kMaxRank) reject(where, "rank over " + std::to_string(kMaxRank));
  for (const Dim& dim : shape) {
    check_index(where, dim.symbol, plan.symbols.size(), true);
    if (dim.add < 0) reject(where, "negative dimension");
  }
}

void check_tensor(const Plan& plan, const TensorSpec& tensor) {
  check_dims(plan, tensor.name, tensor.shape);
  if (tensor.capacity < 0) reject(tensor.name, "negative capacity");
  if (tensor.borrowed) return;
  if (tensor.dtype == Dtype::text) {
    if (tensor.shape.size() > 1) reject(tensor.name, "text has rank 0 or 1");
    return;
  }
  std::int64_t bytes = static_cast<std::int64_t>(dtype_bytes(tensor.dtype));
  for (const Dim& dim : tensor.shape) {
    const std::int64_t size = (dim.symbol < 0 ? 0 : plan.symbols[dim.symbol].bound) + dim.add;
    if (__builtin_mul_overflow(bytes, size, &bytes)) reject(tensor.name, "capacity overflows");
  }
  if (bytes > tensor.capacity) reject(tensor.name, "capacity is smaller than its shape at the bounds");
}

void check_scalar(const Plan& plan, const NodeSpec& node, int tensor, Dtype dtype) {
  check_index(node.name, tensor, plan.tensors.size(), true);
  if (tensor >= 0 && (plan.tensors[tensor].dtype != dtype || !plan.tensors[tensor].shape.empty()))
    reject(node.name, plan.tensors[tensor].name + " is not a scalar of type " + dtype_name(dtype));
}

void check_operand(const Plan& plan, const NodeSpec& node, const Operand& operand) {
  switch (operand.kind) {
    case Operand::Kind::local:
      return check_index(node.name, operand.index, static_cast<std::size_t>(node.locals));
    case Operand::Kind::count:
      if (operand.bound < 1 || operand.at_most_default < 1) reject(node.name, "a count is below 1");
      check_scalar(plan, node, operand.at_most, Dtype::i64);
      return check_scalar(plan, node, operand.index, Dtype::i64);
    case Operand::Kind::scalar:
      return check_scalar(plan, node, operand.index, Dtype::f32);
    case Operand::Kind::row: {
      check_index(node.name, operand.index, plan.tensors.size());
      check_index(node.name, operand.ends, plan.tensors.size());
      const TensorSpec& ends = plan.tensors[operand.ends];
      const bool packed = plan.tensors[operand.index].shape.size() == 1 && ends.dtype == Dtype::i32 &&
                          ends.shape.size() == 1 && ends.shape[0].symbol < 0;
      if (!packed || operand.row < 0 || operand.row + 1 >= ends.shape[0].add)
        reject(node.name, "a row operand does not fit its tensors");
      return;
    }
    default:
      check_index(node.name, operand.index, plan.tensors.size());
  }
}

void check_call(const Plan& plan, const NodeSpec& node, const CallSpec& call) {
  check_index(node.name, call.package, plan.packages.size());
  check_index(node.name, call.when, plan.tensors.size(), true);
  check_index(node.name, call.when_local, static_cast<std::size_t>(node.locals), true);
  const PackageSpec& package = plan.packages[call.package];
  if (call.inputs.size() != package.inputs.size() || call.outputs.size() != package.outputs.size())
    reject(node.name, "call of " + package.name + " has another number of operands than the package");
  for (const Operand& operand : call.inputs) check_operand(plan, node, operand);
  for (const Operand& operand : call.outputs) {
    if (operand.kind != Operand::Kind::tensor && operand.kind != Operand::Kind::local)
      reject(node.name, "an output is neither a tensor nor a local");
    check_operand(plan, node, operand);
  }
}

void check_node(const Plan& plan, const NodeSpec& node) {
  for (int input : node.inputs) check_index(node.name, input, plan.tensors.size(), true);
  for (int output : node.outputs) check_index(node.name, output, plan.tensors.size());
  for (const CheckSpec& check : node.checks) {
    check_index(node.name, check.tensor, plan.tensors.size());
    check_index(node.name, check.cu_seqlens, plan.tensors.size(), check.kind != CheckSpec::Kind::packed);
    if (check.kind != CheckSpec::Kind::at_most) continue;
    check_index(node.name, check.other, plan.tensors.size());
    check_scalar(plan, node, check.tensor, Dtype::i64);
    check_scalar(plan, node, check.other, Dtype::i64);
  }
  for (const CallSpec& call : node.calls) check_call(plan, node, call);
}

}  // namespace

void validate(const Plan& plan) {
  for (const Symbol& symbol : plan.symbols)
    if (symbol.bound < 1) reject(symbol.name, "bound below 1");
  for (const TensorSpec& tensor : plan.tensors) check_tensor(plan, tensor);
  for (const InputSpec& input : plan.inputs) check_index(input.name, input.tensor, plan.tensors.size());
  for (const PackageSpec& package : plan.packages) {
    for (const PackagePort& port : package.inputs) check_dims(plan, package.name, port.shape);
    for (const PackagePort& port : package.outputs) check_dims(plan, package.name, port.shape);
  }
  for (const NodeSpec& node : plan.nodes) check_node(plan, node);
  check_index("response", plan.response, plan.tensors.size());
  if (plan.tensors[plan.response].dtype != Dtype::u8) reject("response", "not of dtype u8");
  for (const WeightSpec& weight : plan.weights)
    if (weight.offset < 0 || weight.bytes < 0 || weight.offset + weight.bytes > plan.weights_bytes)
      reject(weight.name, "lies outside weights.bin");
  if (plan.runners < 1 || plan.contexts < plan.runners || plan.in_flight < plan.contexts || plan.max_queued < 0)
    reject("concurrency", "needs 1 <= runners <= contexts <= in_flight and max_queued >= 0");
}

}  // namespace dagserve
