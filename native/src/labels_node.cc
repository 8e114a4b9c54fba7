#include <algorithm>

#include "cpu_nodes.h"
#include "tokenizer.h"
#include "unicode.h"

namespace dagserve {
namespace {

class LabelsNode final : public CpuNode {
 public:
  explicit LabelsNode(const Config& config)
      : tokenizer_(config.root + "/" + config.at<std::string>("tables")),
        default_ids_(config.at<std::vector<std::int64_t>>("default_ids")),
        vocab_size_(config.at<std::int64_t>("vocab_size")),
        labels_(port(config, "labels")),
        ids_(port(config, "label_token_ids")),
        label_bytes_(labels_ < 0 ? 0 : static_cast<std::size_t>(config.input_bounds[at(labels_)].capacity)) {
    for (const std::int64_t id : default_ids_)
      if (id < 0 || id >= vocab_size_) throw std::invalid_argument("resolve_labels: default_ids are out of range");
    if (std::ssize(default_ids_) > config.output_bounds.at(0).bound[0])
      throw std::invalid_argument("resolve_labels: more default labels than the bound of label_ids");
  }

  std::size_t workspace_bytes() const override { return tokenizer_.workspace_bytes(label_bytes_); }

  void run(std::span<const Tensor> inputs, std::span<Tensor> outputs, std::span<std::byte> workspace,
           Status& status) const noexcept override {
    const Tensor* labels = given(inputs, labels_);
    const Tensor* ids = given(inputs, ids_);
    if (labels && ids)
      return status.fail(Code::invalid_request, "[resolve_labels] labels and label_token_ids are both given; give one");
    if (labels) return resolve_texts(*labels, outputs[0], workspace, status);
    if (ids) return check_ids(*ids, outputs[0], status);
    std::copy(default_ids_.begin(), default_ids_.end(), outputs[0].as<std::int64_t>());
    outputs[0].shape[0] = std::ssize(default_ids_);
  }

 private:
  static std::size_t at(std::ptrdiff_t index) { return static_cast<std::size_t>(index); }

  static std::ptrdiff_t port(const Config& config, std::string_view name) {
    const auto found = std::find(config.inputs.begin(), config.inputs.end(), name);
    return found == config.inputs.end() ? -1 : found - config.inputs.begin();
  }

  static const Tensor* given(std::span<const Tensor> inputs, std::ptrdiff_t index) {
    return index >= 0 && inputs[at(index)].present ? &inputs[at(index)] : nullptr;
  }

  static bool check_count(const char* name, std::int64_t count, const Tensor& output, Status& status) {
    if (count == 0)
      status.fail(Code::invalid_request, "[resolve_labels] %s is empty; give at least one, or leave it out", name);
    else if (count > output.bound[0])
      status.fail(Code::invalid_request, "[resolve_labels] %s has %lld entries, over the bound of %lld; give fewer",
                  name, static_cast<long long>(count), static_cast<long long>(output.bound[0]));
    return status.ok();
  }

  void resolve_texts(const Tensor& labels, Tensor& output, std::span<std::byte> workspace, Status& status) const {
    if (!check_count("labels", labels.rows(), output, status)) return;
    for (std::int64_t i = 0; i < labels.rows(); ++i)
      if (const std::size_t offset = find_invalid_utf8(labels.text(i)); offset != std::string_view::npos)
        return status.fail(Code::invalid_request,
                           "[resolve_labels] labels[%lld] is not valid UTF-8 at byte %zu; send UTF-8 text",
                           static_cast<long long>(i), offset);
    for (std::int64_t i = 0; i < labels.rows(); ++i) {
      TokenSink sink{output.as<std::int64_t>() + i, 1, 0};
      tokenizer_.encode(labels.text(i), {}, workspace, sink);
      if (sink.count != 1)
        return status.fail(Code::invalid_request,
                           "[resolve_labels] labels[%lld] is %lld tokens; a label must be exactly one token "
                           "(most words need a leading space)",
                           static_cast<long long>(i), static_cast<long long>(sink.count));
    }
    output.shape[0] = labels.rows();
  }

  void check_ids(const Tensor& ids, Tensor& output, Status& status) const {
    if (!check_count("label_token_ids", ids.rows(), output, status)) return;
    const std::int64_t* values = ids.as<std::int64_t>();
    for (std::int64_t i = 0; i < ids.rows(); ++i)
      if (values[i] < 0 || values[i] >= vocab_size_)
        return status.fail(Code::invalid_request,
                           "[resolve_labels] label_token_ids[%lld] is %lld, outside the vocabulary; use 0 to %lld",
                           static_cast<long long>(i), static_cast<long long>(values[i]),
                           static_cast<long long>(vocab_size_ - 1));
    std::copy(values, values + ids.rows(), output.as<std::int64_t>());
    output.shape[0] = ids.rows();
  }

  Tokenizer tokenizer_;
  std::vector<std::int64_t> default_ids_;
  std::int64_t vocab_size_;
  std::ptrdiff_t labels_;  // index of the port, -1 where it is not connected
  std::ptrdiff_t ids_;
  std::size_t label_bytes_;
};

}  // namespace

std::unique_ptr<CpuNode> make_labels_node(const Config& config) { return std::make_unique<LabelsNode>(config); }

}  // namespace dagserve
