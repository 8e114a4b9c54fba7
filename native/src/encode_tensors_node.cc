#include "cpu_nodes.h"
#include "json.h"
#include "unicode.h"

namespace dagserve {
namespace {

std::string_view datatype(Dtype dtype) {
  if (dtype == Dtype::f32) return "FP32";
  if (dtype == Dtype::i32) return "INT32";
  if (dtype == Dtype::i64) return "INT64";
  throw std::invalid_argument("encode_tensors writes f32, i32 and i64");
}

class EncodeTensorsNode final : public CpuNode {
 public:
  explicit EncodeTensorsNode(const Config& config) {
    const auto& model = config.at<std::string>("model");
    if (find_invalid_utf8(model) != std::string_view::npos)
      throw std::invalid_argument("encode_tensors: model is not valid UTF-8");
    for (std::size_t i = 0; i < config.inputs.size(); ++i) {
      const std::string begin = i == 0 ? "{\"model_name\":" + json_string(model) + ",\"outputs\":[" : "},";
      heads_.push_back(begin + "{\"name\":" + json_string(config.inputs[i]) + ",\"datatype\":\"" +
                       std::string(datatype(config.input_bounds[i].dtype)) + "\",\"shape\":[");
    }
  }

  void run(std::span<const Tensor> inputs, std::span<Tensor> outputs, std::span<std::byte>,
           Status& status) const noexcept override {
    JsonWriter out(outputs[0].as<char>(), outputs[0].bound[0]);
    for (std::size_t i = 0; i < inputs.size(); ++i) {
      out.text(heads_[i]);
      for (int axis = 0; axis < inputs[i].rank; ++axis) {
        if (axis > 0) out.text(",");
        out.number(inputs[i].shape[axis]);
      }
      out.text("],\"data\":[");
      write_values(inputs[i], out);
      out.text("]");
    }
    out.text("}]}");
    if (out.full())
      return status.fail(Code::internal, "[encode_tensors] the reply is longer than its bound of %lld bytes",
                         static_cast<long long>(outputs[0].bound[0]));
    outputs[0].shape[0] = out.size();
  }

 private:
  static void write_values(const Tensor& tensor, JsonWriter& out) {
    for (std::int64_t i = 0; i < tensor.numel(); ++i) {
      if (i > 0) out.text(",");
      if (tensor.dtype == Dtype::f32)
        out.real(tensor.as<float>()[i]);
      else if (tensor.dtype == Dtype::i32)
        out.number(tensor.as<std::int32_t>()[i]);
      else
        out.number(tensor.as<std::int64_t>()[i]);
    }
  }

  std::vector<std::string> heads_;  // what comes before the shape of each tensor
};

}  // namespace

std::unique_ptr<CpuNode> make_encode_tensors_node(const Config& config) {
  return std::make_unique<EncodeTensorsNode>(config);
}

}  // namespace dagserve
